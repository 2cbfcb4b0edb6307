"""Words to hide: an adjective and a noun, as RULER makes its keys."""

from random import Random

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


def draw_words(count: int, random: Random) -> list[str]:
    """Different words such as "quiet-river"."""
    numbers = random.sample(range(len(ADJECTIVES) * len(NOUNS)), count)
    return [f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}" for number in numbers]
