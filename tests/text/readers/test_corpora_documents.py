from mtkit.text.readers.corpora import SegmentPair, parted_by_empty_lines


def test_a_pair_without_text_is_the_last_of_its_document() -> None:
    texts = [("a", "x"), ("", ""), ("b", ""), ("", "y"), ("", ""), ("", "")]
    pairs = [SegmentPair(line, *text) for line, text in enumerate(texts, start=1)]
    parted = list(parted_by_empty_lines(pairs))
    assert [pair.document for pair in parted] == [1, 1, 2, 2, 2, 3]
    assert [pair[:3] for pair in parted] == [pair[:3] for pair in pairs]
