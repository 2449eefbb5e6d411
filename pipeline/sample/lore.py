"""Words of the sample world: an invented catalogue of radio plays and those who listen to them.

Words carry a meaning, the *lore*: each word of a title belongs to one theme, and no column of the tables says which.
Every list is closed and of our own invention; `world.py` draws from it and the texts that the sample model learns are
written with it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    """One hidden theme.

    Parameters
    ----------
    name : what texts call it; never appears in a table.
    nouns, adjectives : title words, each belonging to this theme alone.
    images : phrases by which texts describe it.
    feeling : what its listeners look for.
    cues : what a listener who likes it says of themselves at sign-up.
    """

    name: str
    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    images: tuple[str, ...]
    feeling: str
    cues: tuple[str, ...]


def _theme(name: str, nouns: str, adjectives: str, images: str, feeling: str, cues: str) -> Theme:
    return Theme(
        name,
        tuple(nouns.split()),
        tuple(adjectives.split()),
        tuple(part.strip() for part in images.split(",")),
        feeling,
        tuple(part.strip() for part in cues.split(",")),
    )


THEMES: tuple[Theme, ...] = (
    _theme(
        "the sea",
        "Harbour Tide Anchor Lighthouse Sailor Reef Gull Keel Ferry Lagoon",
        "Salt Briny Drifting Tidal Moored Seaward",
        "ships and open water, salt air, storms off the coast, life in port",
        "distance",
        "I grew up beside a dock, my weekends go to rowing, I can tell the wind by its smell",
    ),
    _theme(
        "machines",
        "Engine Gear Piston Foundry Lever Boiler Turbine Automaton Rivet Workshop",
        "Brass Wound Oiled Iron Geared Ticking",
        "clever devices, smoke and metal, inventors at work, things built by hand",
        "ingenuity",
        "I repair radios for fun, I like to take things apart, my shed is full of tools",
    ),
    _theme(
        "winter",
        "Snow Glacier Sled Blizzard Frost Hearth Icicle Avalanche Ski Thaw",
        "White Frozen Polar Northern Drifted Bitter",
        "deep snow, long nights, warmth indoors, silence over white hills",
        "stillness",
        "I count the days until it snows, long dark evenings suit me, I own far too many scarves",
    ),
    _theme(
        "the harvest",
        "Orchard Barn Scythe Vineyard Wheat Cider Plough Meadow Granary Beehive",
        "Golden Ripe Sunlit Fallow Rustic Sown",
        "farm life, ripe fields, seasons turning, work on the land",
        "rootedness",
        "I keep bees and a vegetable patch, my family has always farmed, I would rather be out in a field",
    ),
    _theme(
        "the stars",
        "Comet Orbit Observatory Nebula Eclipse Astronaut Meteor Telescope Satellite Zenith",
        "Stellar Lunar Weightless Cosmic Radiant Astral",
        "far worlds, the night sky, voyages beyond the air, first contact",
        "wonder",
        "I spend clear nights on the roof with a lens, I once wanted to fly rockets, I know every constellation",
    ),
    _theme(
        "the stage",
        "Curtain Violin Theatre Puppet Encore Orchestra Masque Prompter Chorus Ballet",
        "Velvet Gilded Masked Painted Applauded Rehearsed",
        "actors and rivals, music in the wings, opening nights, life behind the scenes",
        "show",
        "I sing in a choir, I never miss a premiere, I did amateur acting for years",
    ),
    _theme(
        "crime and secrets",
        "Cipher Alibi Dagger Ledger Forger Witness Locket Poison Informer Vault",
        "Hidden Forged Sealed Coded Stolen Whispered",
        "lies and motives, secrets found out, clever thieves, old guilt",
        "suspense",
        "I do cryptic puzzles at breakfast, I always guess the culprit, I read the court reports first",
    ),
    _theme(
        "wild beasts",
        "Wolf Falcon Stag Fox Bear Raven Lynx Otter Heron Badger",
        "Feathered Clawed Untamed Howling Furred Horned",
        "animals and their keepers, tracks in the mud, hunters and hunted, the wild at the door",
        "instinct",
        "I volunteer at an animal shelter, my three dogs listen along, I watch birds every Sunday",
    ),
    _theme(
        "kinship",
        "Cradle Grandmother Sister Wedding Heirloom Supper Twin Cousin Godson Portrait",
        "Inherited Motherly Orphaned Beloved Estranged Reunited",
        "families and their quarrels, generations, love that lasts, coming home",
        "belonging",
        "I have six children and a full table, I am the one who keeps the family tree, I call my aunt each day",
    ),
    _theme(
        "the desert",
        "Dune Oasis Caravan Mirage Camel Scorpion Nomad Canyon Cactus Bazaar",
        "Scorched Sandy Parched Wandering Shimmering Dusty",
        "endless sand, heat and thirst, traders on the road, ruins under the sun",
        "endurance",
        "I once crossed Namibia on foot, heat has never bothered me, I collect maps of dry places",
    ),
    _theme(
        "spirits",
        "Ghost Seance Phantom Crypt Banshee Omen Shroud Wraith Graveyard Medium",
        "Haunted Pale Restless Spectral Cursed Moonlit",
        "restless dead, old houses, signs and omens, what waits in the dark",
        "dread",
        "I sleep best after a fright, our house creaks and I love it, I visit old churchyards on holiday",
    ),
    _theme(
        "revolt",
        "Barricade Banner Manifesto Rebel Uprising Exile Tribune Prison Pamphlet Strike",
        "Burning Defiant Outlawed Banned Marching Unbroken",
        "the people against power, hard choices, comrades, a cause worth the cost",
        "justice",
        "I was at every march, my grandfather was a union man, I argue politics with anyone",
    ),
)

# top level -> second level -> third level
CATEGORIES: dict[str, dict[str, tuple[str, str, str]]] = {
    "Mystery": {
        "Detective": ("Village", "Police", "Amateur"),
        "Heist": ("Caper", "Museum", "Train"),
        "Noir": ("City", "Private", "Night"),
    },
    "Romance": {
        "Courtship": ("Letters", "Summer", "Office"),
        "Second-Chance": ("Divorce", "Hometown", "Widow"),
        "Rivals": ("Kitchen", "Newsroom", "Estate"),
    },
    "Adventure": {
        "Quest": ("Treasure", "Relic", "Rescue"),
        "Survival": ("Island", "Mountain", "Jungle"),
        "Expedition": ("River", "Cave", "Air"),
    },
    "Fantasy": {
        "Fairytale": ("Forest", "Castle", "Bargain"),
        "Epic": ("Dragon", "Throne", "Prophecy"),
        "Magic": ("School", "Guild", "Market"),
    },
    "Comedy": {
        "Farce": ("Hotel", "Mistaken", "Chase"),
        "Satire": ("Government", "Media", "Academy"),
        "Sitcom": ("Flatmates", "Pub", "Neighbours"),
    },
    "Chronicle": {
        "War": ("Front", "Homefront", "Spy"),
        "Royalty": ("Court", "Regent", "Consort"),
        "Frontier": ("Settlers", "Railway", "Gold"),
    },
    "Thriller": {
        "Conspiracy": ("Bank", "Embassy", "Laboratory"),
        "Manhunt": ("Border", "Fugitive", "Sniper"),
        "Disaster": ("Flood", "Reactor", "Bridge"),
    },
    "Documentary": {
        "Science": ("Medicine", "Physics", "Climate"),
        "Biography": ("Artist", "Statesman", "Athlete"),
        "Travel": ("Rail", "Pilgrim", "Food"),
    },
}
TOP_CATEGORIES: tuple[str, ...] = tuple(CATEGORIES)
CATEGORY_PATHS: tuple[tuple[str, str, str], ...] = tuple(
    (top, middle, leaf) for top, middles in CATEGORIES.items() for middle, leaves in middles.items() for leaf in leaves
)

MOODS: tuple[str, ...] = ("tender", "grim", "playful", "dreamy", "tense", "wry", "solemn", "hopeful")
ERAS: tuple[str, ...] = ("1950s", "1960s", "1970s", "1980s", "1990s", "2000s", "2010s")
REGIONS: tuple[str, ...] = ("Ostmark", "Velden", "Carrow", "Lisle", "Thornby", "Maravel", "Quill Bay", "Hestia")
AGE_BANDS: tuple[str, ...] = ("under 25", "25 to 34", "35 to 49", "50 to 64", "over 64")
PLACES: tuple[str, ...] = (
    "Ambervale", "Brackwick", "Corvane", "Dunmere", "Elsinby", "Farrowgate", "Glenholt", "Hollin", "Istra", "Jarrowfen",
    "Kestle", "Lorne", "Marrowby", "Nethercote", "Ormsay", "Pellgrave",
)  # fmt: skip

FIRST_NAMES: tuple[str, ...] = (
    "Ada", "Boris", "Clea", "Dorian", "Edda", "Felix", "Greta", "Hugo", "Ines", "Jonas",
    "Kira", "Lev", "Mina", "Nils", "Oona", "Pavel", "Rhea", "Silas", "Tova", "Uri",
)  # fmt: skip
LAST_NAMES: tuple[str, ...] = (
    "Abendroth", "Blyth", "Calloway", "Drummel", "Eastlake", "Fenwick", "Garrity", "Hallam", "Ivers", "Jessop",
    "Kellaway", "Lindqvist", "Marsh", "Norrell", "Okoro", "Pryce", "Quarles", "Rosling", "Sorrel", "Tamm",
    "Underhill", "Venn", "Whitlock", "Yarrow", "Zeller", "Ashdown", "Birch", "Crane", "Dovey", "Elgin",
)  # fmt: skip

TITLE_PATTERNS: tuple[str, ...] = (
    "The {a} {n}",
    "{a} {n}",
    "The {a} {n} of {p}",
    "Beyond the {a} {n}",
    "{p} and the {a} {n}",
)

ABOUT_CATEGORY: tuple[str, ...] = (
    "{} is my first choice",
    "I mostly put on {}",
    "I came here for {}",
    "give me {} any day",
)
ABOUT_MOOD: tuple[str, ...] = ("something {} is best", "I prefer it {}", "a {} tone wins me over")
ABOUT_ERA: tuple[str, ...] = ("the {} were the best years of radio", "I look for the {}")
ABOUT_STRICT: tuple[str, ...] = ("I am hard to please", "few things deserve full marks")
ABOUT_GENEROUS: tuple[str, ...] = ("I enjoy nearly everything", "I give high marks easily")

_NOUN_THEME = {noun: index for index, theme in enumerate(THEMES) for noun in theme.nouns}
_ADJECTIVE_THEME = {word: index for index, theme in enumerate(THEMES) for word in theme.adjectives}
_CUE_THEME = {cue: index for index, theme in enumerate(THEMES) for cue in theme.cues}


@dataclass(frozen=True)
class TitleThemes:
    """What a title's words imply: indices into `THEMES`, None where no word is known."""

    main: int | None
    undertone: int | None


def title_themes(title: str) -> TitleThemes:
    """Read the lore in a title: the noun gives the main theme, the adjective the undertone."""
    words = title.split()
    main = next((_NOUN_THEME[word] for word in words if word in _NOUN_THEME), None)
    undertone = next((_ADJECTIVE_THEME[word] for word in words if word in _ADJECTIVE_THEME), None)
    return TitleThemes(main, undertone)


def about_themes(about: str) -> tuple[int, ...]:
    """Themes that a sign-up statement hints at, in the order in which it does."""
    about = about.lower()  # a sentence begins with a capital
    found = sorted((about.find(cue.lower()), theme) for cue, theme in _CUE_THEME.items() if cue.lower() in about)
    return tuple(theme for _, theme in found)
