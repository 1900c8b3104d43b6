"""Checkpoints on the disk: what they hold, and how they are written, found, compared and restored.

Imports nothing of the loops that use it (`engine/`, `hf/`): they pass what a checkpoint holds, and how ranks agree.
`manifest` is the seal of a folder, `find` reads which folders there are, `write` makes, moves and removes them; these
three load no torch. `state`, `optimizer` and `weights` are the content, `snapshot` collects it at one step, `save`
decides when, `compare` refuses changes of a resumed run, and `restore` gives everything back.
"""
