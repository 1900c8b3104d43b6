"""Extractive question answering: the answer to a question is a stretch of its context, as in SQuAD."""

COMMANDS = {
    "qa": ("trains", "train, evaluate and run a question answering model"),
    "ask": ("answers", "ask a trained model questions about a text"),
    "demo": ("demonstrates", "train a small model to answer questions"),
}
