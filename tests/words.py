"""Text to train on and to score: a few words over and over, the same in every run."""

WORDS = "the sea was calm and the night was long while we sailed on towards the islands of the south"


def write_text(path, documents=4, words=150, first=0):
    words_in_turn = WORDS.split(" ")
    path.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + documents):
        text = " ".join(words_in_turn[(number + 3 * index + index // 7) % len(words_in_turn)] for index in range(words))
        (path / f"{number}.txt").write_text(text)
