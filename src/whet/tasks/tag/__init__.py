"""Token classification: each word of a sentence gets a tag, such as the kind of an entity or a part of speech."""

COMMANDS = {"tag": ("trains", "train, evaluate and run a tagger of words")}
