"""Text classification: a text, or a pair of texts, gets one label, several labels, or a number."""

COMMANDS = {"classify": ("trains", "train, evaluate and run a text classifier")}
