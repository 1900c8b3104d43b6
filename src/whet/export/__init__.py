"""`whet export`: a trained model as a folder that another runtime serves, checked against the model that it came from.

What another library does, it does: transformers' exporters trace and convert, the runtimes' own quantisers make int8.
This room decides which rows a graph is traced, calibrated and checked with, when a check fails, and what the folder
holds. How such a folder is read again, `models/loading/exported.py` decides.
"""
