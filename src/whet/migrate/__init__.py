"""`whet migrate`: from a command line, a script or a configuration of other programs to the command of whet.

`shell` reads words as a shell does, `launchers` and `accelerate` know what starts ranks, `variables` the environment,
`programs` the scripts and their options, `files` what stands in files. All of them write into a `draft.Draft`, which
becomes a command that whet's own parser accepts, and a row for each thing that was given. What options whet has, and
what became of older ones, is not repeated here: the settings classes say it (`config/aliases.py`, `jobs/fields.py`).
"""
