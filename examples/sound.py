"""Spoken digits as patches of a spectrogram: positions on two axes, time and frequency.

Trained on clips of 0.64 seconds, tested on longer ones: silence around the digit, and a second digit, where both must
be among the two highest scores.

    python examples/sound.py --data spoken-digits --out sound.json
"""

import wave
from pathlib import Path

import torch
from blocks import KINDS, PatchClassifier, accuracy, predict, train
from results import compare, parse, report

PATCH, HOP, BANDS = 8, 80, 32
FRAMES = 64
SILENT = (128, 256)
TEST_INDICES = range(5)
"""The split of the data's authors."""


def read(folder):
    """[(samples, digit, whether it is for testing)] of files {digit}_{speaker}_{index}.wav at 8 kHz."""
    found = []
    for path in sorted(Path(folder).glob("*.wav")):
        digit, _, index = path.stem.split("_")
        with wave.open(str(path)) as file:
            samples = torch.frombuffer(bytearray(file.readframes(file.getnframes())), dtype=torch.int16).float()
        found.append((samples / samples.abs().max().clamp(min=1), int(digit), int(index) in TEST_INDICES))
    return found


def clip(parts, frames, generator=None):
    """Sounds one after the other in a clip of that many frames: in the middle, or with random pauses; cut if longer."""
    length = frames * HOP
    share = length // len(parts)
    clip = torch.zeros(length)
    for index, part in enumerate(parts):
        part = part[max(0, (len(part) - share) // 2) :][:share]
        room = share - len(part)
        start = room // 2 if generator is None else int(torch.randint(room + 1, (), generator=generator))
        clip[index * share + start : index * share + start + len(part)] = part
    return clip


def spectrograms(clips):
    """Logarithmic magnitudes [B, frames, bands] of clips [B, samples]."""
    found = torch.stft(clips, 256, HOP, window=torch.hann_window(256), center=True, return_complex=True)
    power = found.abs()[:, 1:, :-1].unflatten(1, (BANDS, -1)).square().mean(2)
    return (torch.log10(power + 1e-4).transpose(1, 2) + 2) / 2


def main(arguments=None):
    chosen = parse(__doc__, arguments, KINDS, data=True, epochs=20, width=64, layers=3)
    recordings = read(chosen.data)
    parts = {held: [(sound, digit) for sound, digit, test in recordings if test == held] for held in (False, True)}
    labels = {held: torch.tensor([digit for _, digit in own]) for held, own in parts.items()}
    short = {held: spectrograms(torch.stack([clip([x], FRAMES) for x, _ in own])) for held, own in parts.items()}
    tested, answers = parts[True], labels[True]

    def longer(frames):
        generator = torch.Generator().manual_seed(0)
        return spectrograms(torch.stack([clip([sound], frames, generator) for sound, _ in tested]))

    def pairs():
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(len(tested), generator=generator)
        order = torch.where(answers[order] == answers, (order + len(order) // 2) % len(order), order)
        clips = [
            clip([sound, tested[other][0]], 2 * FRAMES)
            for (sound, _), other in zip(tested, order.tolist(), strict=True)
        ]
        return spectrograms(torch.stack(clips)), torch.stack((answers, answers[order]), dim=1)

    def run(kind, seed):
        grid = (FRAMES // PATCH, BANDS // PATCH)
        model = PatchClassifier(kind, PATCH**2, grid, width=chosen.width, layers=chosen.layers)
        train(model, short[False], labels[False], PATCH, chosen.epochs, seed, batch=32)
        row = {"0.64 s, trained": accuracy(predict(model, short[True], PATCH), answers)}
        for frames in SILENT:
            row[f"{frames / 100} s, silence"] = accuracy(predict(model, longer(frames), PATCH), answers)
        both, digits = pairs()
        differ = digits[:, 0] != digits[:, 1]
        best = predict(model, both, PATCH).topk(2).indices.sort(-1).values
        row["1.28 s, two digits"] = 100 * (best == digits.sort(-1).values).all(-1)[differ].double().mean().item()
        return row

    return report(compare(chosen.kinds, chosen.seeds, run), chosen, "python examples/sound.py")


if __name__ == "__main__":
    main()
