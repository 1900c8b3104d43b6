"""Causal language models: they learn texts, conversations or preferences, and continue what they are given."""

COMMANDS = {
    "lm": ("trains", "train and evaluate a causal language model"),
    "generate": ("answers", "continue a text, or chat, with a language model"),
    "demo-lm": ("demonstrates", "train a small language model; nothing is downloaded"),
}
