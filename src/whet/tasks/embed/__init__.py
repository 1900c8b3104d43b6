"""Sentence embeddings and rerankers: models of sentence-transformers, which its trainers train over `whet.optimize`."""

COMMANDS = {
    "embed": ("trains", "train a model that turns texts into vectors, for search"),
    "rerank": ("trains", "train a model that scores pairs of texts"),
    "search": ("answers", "search a file with a trained embedding model"),
}
