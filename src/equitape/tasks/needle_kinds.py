"""The kinds of needles, in the manner of RULER (Hsieh et al., arXiv 2404.06654): what is hidden, asked, and expected.

single           one key with one number of seven digits
multikey         four keys with a number each; one is asked for
multivalue       one key with four numbers; all are asked for
multiquery       four keys with a number each; all are asked for
variables        VAR A = 12345, VAR B = VAR A, ...: a chain of five; all names with that value are asked for
common_words     a numbered list; the ten words that occur most often are asked for

`passkey` makes the prompts of passkey retrieval.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_uppercase

from .haystack import Hidden, PromptMaker, TooShortError

PASSKEY_OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about "
    "the important information there.\n"
)
PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key.\n"
PASSKEY_QUESTION = "What is the pass key? The pass key is"
NEEDLES, HOPS, COMMON = 4, 4, 10
OPENING = (
    "{some} special magic {numbers} hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {numbers_only} afterwards.\n"
)
NEEDLE = "One of the special magic numbers for {key} is: {value}.\n"
ONE_QUESTION = (
    "What is the special magic number for {keys} mentioned in the provided text? The special magic number for {keys} "
    "mentioned in the provided text is"
)
MANY_QUESTION = (
    "What are all the special magic numbers for {keys} mentioned in the provided text? The special magic numbers for "
    "{keys} mentioned in the provided text are"
)
VARIABLES_OPENING = "Memorize and track the chain of variable assignment hidden in the following text.\n\n"
VARIABLES_QUESTION = (
    "Question: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
    "chain of variable assignment in the text above, {count} variables are assigned the value {value}, they are:"
)
COMMON_OPENING = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n"
)
COMMON_QUESTION = (
    "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often "
    "in the list are:"
)

# words for RULER's keys: an adjective and a noun
ADJECTIVES = """
able amber ancient ashen azure bald bitter blind blue bold brave brief bright brisk broad bronze busy calm cheap
chilly civil clean clear clever close cloudy coarse cold cool crisp crude curly damp dark deep dense dim distant dry
dull dusty eager early easy empty even faint fair famous fancy fast fatal fierce fine firm flat fond formal frank free
fresh full gentle giant glad golden grand gray green happy hard harsh hasty heavy hidden hollow honest humble icy idle
jolly keen kind large late lazy lean light little lively local lone long loose loud loyal lucky mad major mellow mild
minor misty modern narrow neat new noble noisy odd old orange pale plain polite proud pure quick quiet rapid rare raw
ready red rich ripe rough round royal rude rural rusty sad safe salty sharp shiny short shy silent silver simple
sleepy slim slow small smooth soft solid sour spare steep stern stiff strange strict strong sudden sunny sweet swift
tall tame tense thick thin tidy tiny tired tough true ugly urban vague vast violet vivid warm weak weary wet white
whole wide wild windy wise wooden yellow young
""".split()  # noqa: SIM905
NOUNS = """
anchor apple arch arrow autumn badge bakery ball bamboo banana barn basin basket beach beacon bean bear bell bench
berry bird blanket blossom board boat bottle bowl box branch bread breeze brick bridge brook brush bucket butter
button cabin cable cactus camel camera candle canoe canyon carpet carrot castle cave cellar chain chair chalk cherry
circle city cliff clock cloud clover coast coat coin comet copper coral corner cottage cotton crab cradle crane crater
creek crow crown crystal curtain daisy dam deer desert diary dish dolphin door dragon drawer dream drum dune eagle
ember engine falcon farm feather fence fern field finch fire flag flame flint flower flute forest fork fountain fox
frog frost garden garlic gate ghost ginger glacier glove goat grape gravel grove guitar hammer harbor harp hawk hazel
helmet heron hill hinge honey hook horn horse house island ivory ivy jacket jar jewel jungle kettle key king kite
kitten ladder lagoon lake lamp lantern leaf lemon letter lily lion lizard lobster lotus magnet mango maple marble
market mask meadow melon mill mint mirror mole monkey moon moss moth mountain mouse museum needle nest night oak oasis
ocean olive onion orchard otter owl paddle palace panda paper parrot path peach pearl pebble pencil pepper piano
pigeon pillow pine pirate planet plum pocket pond poppy potato prince puppy quartz queen quilt rabbit raven reef
ribbon rice ring river robin rocket roof rope rose saddle sailor salmon sand scarf school seal seed shadow sheep shell
ship shirt shore silk sky sled smoke snail snow sparrow spider spoon spring squirrel stable star statue stone storm
stove stream street summer swan sword table tailor temple thorn throne thunder tiger toad torch tower train tree tulip
tunnel turtle valley vase vine violin wagon walnut water wave whale wheat wheel willow window winter wolf wool zebra
""".split()  # noqa: SIM905


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt of exact length, and what its answer must contain."""

    tokens: list[int]
    references: list[str]
    depth: float | None
    """Depth of the asked needle; None if several are asked for."""


Kind = Callable[[PromptMaker, int, float, Random], Example]
"""(maker, length, depth of the asked needle if it is one, random numbers) -> example."""


def passkey(maker: PromptMaker, length: int, depth: float, random: Random) -> Example:
    """A number of five digits."""
    key = random.randint(10000, 99999)
    hidden = [Hidden(text=PASSKEY.format(key=key), depth=depth)]
    tokens = maker.build(length, PASSKEY_OPENING, hidden, PASSKEY_QUESTION, random)
    return Example(tokens=tokens, references=[str(key)], depth=depth)


def magic_numbers(num_keys: int, num_values: int, num_asked: int) -> Kind:
    """Keys with numbers, some of which are asked for."""

    def make(maker: PromptMaker, length: int, depth: float, random: Random) -> Example:
        keys = draw_words(num_keys, random)
        numbers = random.sample(range(10**6, 10**7), num_keys * num_values)
        values = {key: numbers[place :: len(keys)] for place, key in enumerate(keys)}
        asked = random.sample(keys, num_asked)
        pairs = [(key, value) for key in keys for value in values[key]]
        random.shuffle(pairs)
        only = len(asked) == num_values == 1
        hidden = [
            Hidden(text=NEEDLE.format(key=key, value=value), depth=depth if only and key in asked else random.random())
            for key, value in pairs
        ]
        named = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        opening = OPENING.format(
            some="A" if only else "Some",
            numbers="number is" if only else "numbers are",
            numbers_only="number" if only else "numbers",
        )
        question = (ONE_QUESTION if only else MANY_QUESTION).format(keys=named)
        return Example(
            tokens=maker.build(length, opening, hidden, question, random),
            references=[str(value) for key in asked for value in values[key]],
            depth=depth if only else None,
        )

    return make


def variables(maker: PromptMaker, length: int, depth: float, random: Random) -> Example:
    """A chain of assignments, in order, at random places."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(random.choices(ascii_uppercase, k=5))
        if name not in names:
            names.append(name)
    value = random.randint(10000, 99999)
    lines = [f"VAR {names[0]} = {value}\n"]
    lines += [f"VAR {new} = VAR {old}\n" for old, new in pairwise(names)]
    depths = sorted(random.random() for _ in lines)
    hidden = [Hidden(text=line, depth=place) for line, place in zip(lines, depths, strict=True)]
    question = VARIABLES_QUESTION.format(value=value, count=len(names))
    return Example(
        tokens=maker.build(length, VARIABLES_OPENING, hidden, question, random), references=names, depth=None
    )


def common_words(maker: PromptMaker, length: int, depth: float, random: Random) -> Example:
    """A list that fills the prompt; tokens too few for another entry are filler before it."""
    encode = maker.encode
    fixed = len(maker.beginning) + len(encode(COMMON_OPENING)) + len(encode(COMMON_QUESTION))

    def list_of(entries: int) -> tuple[list[int], list[str]]:
        words, common = word_list(entries, random)
        return encode(" ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))), common

    room = length - fixed
    entries = least = COMMON * 4
    tokens, common = smallest = list_of(entries)
    # estimate from the size of an entry so far; then fewer, since later numbers have more digits
    while entries < (wanted := int(entries * room / len(tokens))):
        entries = wanted
        tokens, common = list_of(entries)
    while len(tokens) > room and entries > least:
        entries = max(least, min(entries - 1, int(entries * room / len(tokens))))
        tokens, common = list_of(entries)
    if len(tokens) > room:
        # a list of the same size may have longer words when drawn again
        tokens, common = smallest
    if len(tokens) > room:
        raise TooShortError(length, fixed + len(tokens))
    filler, _ = maker.filler.draw(room - len(tokens), random)
    opening = [*maker.beginning, *encode(COMMON_OPENING)]
    prompt = [*opening, *filler, *tokens, *encode(COMMON_QUESTION)]
    return Example(tokens=prompt, references=common, depth=None)


def word_list(entries: int, random: Random) -> tuple[list[str], list[str]]:
    """A shuffled list of `size` words, and its ten common words.

    Long lists are RULER's: common words 30 times, all others 3 times. In short ones common words take half of the list,
    at least 3 times each, and all others occur once.
    """
    often = min(max(entries // (2 * COMMON), 3), 30)
    seldom = 3 if often == 30 else 1
    others = entries - COMMON * often
    words = draw_words(COMMON + -(-others // seldom), random)
    common = words[:COMMON]
    listed = common * often + (words[COMMON:] * seldom)[:others]
    random.shuffle(listed)
    return listed, common


def draw_words(count: int, random: Random) -> list[str]:
    """Different words such as "quiet-river"."""
    numbers = random.sample(range(len(ADJECTIVES) * len(NOUNS)), count)
    return [f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}" for number in numbers]


KINDS: dict[str, Kind] = {
    "single": magic_numbers(1, 1, 1),
    "multikey": magic_numbers(NEEDLES, 1, 1),
    "multivalue": magic_numbers(1, NEEDLES, 1),
    "multiquery": magic_numbers(NEEDLES, 1, NEEDLES),
    "variables": variables,
    "common_words": common_words,
}
