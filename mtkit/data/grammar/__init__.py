"""The built-in corpus: sentences and documents that a grammar writes in English and German at once."""
