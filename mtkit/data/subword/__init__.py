"""Subword regularisation: training text cut into other pieces each epoch, as a pure function of seed and row.

Papers: Provilkov et al., "BPE-Dropout", ACL 2020, arXiv 1910.13267; Kudo, "Subword Regularization", ACL 2018, arXiv
1804.10959. sentencepiece samples both, but its draws differ from process to process whatever its seed; these do not.
"""
