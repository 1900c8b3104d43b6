"""What a run will take, before it runs: memory by part, time by part, and settings that fit.

The room decides how both are forecast. It is given a prepared model and batches, reads no weights and trains nothing;
who prepares them, and who prints what, `engine/` and `cli/` decide.
"""
