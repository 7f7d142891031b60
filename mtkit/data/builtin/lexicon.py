"""The words of the built-in corpus in English and German, with the forms that agreement requires."""

from dataclasses import dataclass
from typing import NamedTuple

CASES = ("nominative", "accusative", "dative", "genitive")


class Pair(NamedTuple):
    """Uninflected words: adverbs, conjunctions, names, places with their preposition."""

    english: str
    german: str


def _pairs(words: str) -> tuple[Pair, ...]:
    return tuple(Pair(*pair.split()) for pair in words.split(", "))


@dataclass(frozen=True)
class Noun:
    """A noun with its German gender (m, f or n), plural, and the endings of its singular."""

    english: str
    plural: str
    german: str
    gender: str
    german_plural: str
    genitive: str = ""
    """Ending of the genitive singular."""
    weak: str = ""
    """Ending of all singular cases except the nominative: "der Junge, den Jungen"."""

    def form(self, case: str, plural: bool) -> str:
        """Return the German noun in a case and number; the dative plural adds -n if possible."""
        if plural:
            adds_n = case == "dative" and not self.german_plural.endswith(("n", "s"))
            return self.german_plural + ("n" if adds_n else "")
        if self.weak and case != "nominative":
            return self.german + self.weak
        return self.german + (self.genitive if case == "genitive" else "")


@dataclass(frozen=True)
class Adjective:
    """An adjective with its comparatives."""

    english: str
    german: str
    more: str = ""
    german_more: str = ""

    @property
    def stem(self) -> str:
        """The German stem, to which endings are added."""
        return self.german.removesuffix("e")


@dataclass(frozen=True)
class Verb:
    """A verb: English base, third person and past; German forms for ich, du, er, wir, and the participle.

    A German `prefix` separates in main clauses; an English `particle` follows a pronoun object, and a `preposition`
    precedes the object. `case` is the German object's case, `auxiliary` the German perfect's auxiliary.
    """

    english: str
    forms: str
    prefix: str = ""
    particle: str = ""
    preposition: str = ""
    case: str = "accusative"
    auxiliary: str = "haben"

    @property
    def base(self) -> str:
        """The English infinitive."""
        return self.english.split()[0]

    def inflected(self, tense: str, third_singular: bool) -> str:
        """Return the English present or past without an auxiliary."""
        base, third, past = self.english.split()
        return past if tense == "past" else third if third_singular else base

    def present(self, person: int, plural: bool) -> str:
        """Return the German finite present, without its prefix."""
        return self.forms.split()[3 if plural else person - 1]

    @property
    def infinitive(self) -> str:
        """The German infinitive, the prefix joined."""
        return self.prefix + self.forms.split()[3]

    @property
    def zu_infinitive(self) -> str:
        """The German infinitive with zu, which follows a separable prefix."""
        stem = self.forms.split()[3]
        return f"{self.prefix}zu{stem}" if self.prefix else f"zu {stem}"

    @property
    def participle(self) -> str:
        """The German past participle, the prefix joined."""
        return self.prefix + self.forms.split()[4]


AUXILIARIES = {
    "haben": ("habe", "hast", "hat", "haben"),
    "sein": ("bin", "bist", "ist", "sind"),
    "war": ("war", "warst", "war", "waren"),
    "will": ("werde", "wirst", "wird", "werden"),
    "can": ("kann", "kannst", "kann", "können"),
    "must": ("muss", "musst", "muss", "müssen"),
    "should": ("soll", "sollst", "soll", "sollen"),
    "want": ("will", "willst", "will", "wollen"),
}
"""German finite forms for ich, du, er, wir; English modals name the German ones."""

PEOPLE = (
    Noun("man", "men", "Mann", "m", "Männer", "es"),
    Noun("woman", "women", "Frau", "f", "Frauen"),
    Noun("child", "children", "Kind", "n", "Kinder", "es"),
    Noun("teacher", "teachers", "Lehrer", "m", "Lehrer", "s"),
    Noun("neighbour", "neighbours", "Nachbar", "m", "Nachbarn", weak="n"),
    Noun("doctor", "doctors", "Arzt", "m", "Ärzte", "es"),
    Noun("girl", "girls", "Mädchen", "n", "Mädchen", "s"),
    Noun("boy", "boys", "Junge", "m", "Jungen", weak="n"),
    Noun("friend", "friends", "Freund", "m", "Freunde", "es"),
    Noun("sister", "sisters", "Schwester", "f", "Schwestern"),
    Noun("student", "students", "Student", "m", "Studenten", weak="en"),
)

THINGS = (
    Noun("letter", "letters", "Brief", "m", "Briefe"),
    Noun("table", "tables", "Tisch", "m", "Tische"),
    Noun("coat", "coats", "Mantel", "m", "Mäntel"),
    Noun("key", "keys", "Schlüssel", "m", "Schlüssel"),
    Noun("apple", "apples", "Apfel", "m", "Äpfel"),
    Noun("lamp", "lamps", "Lampe", "f", "Lampen"),
    Noun("clock", "clocks", "Uhr", "f", "Uhren"),
    Noun("bag", "bags", "Tasche", "f", "Taschen"),
    Noun("flower", "flowers", "Blume", "f", "Blumen"),
    Noun("newspaper", "newspapers", "Zeitung", "f", "Zeitungen"),
    Noun("book", "books", "Buch", "n", "Bücher"),
    Noun("picture", "pictures", "Bild", "n", "Bilder"),
    Noun("car", "cars", "Auto", "n", "Autos"),
    Noun("shirt", "shirts", "Hemd", "n", "Hemden"),
    Noun("bicycle", "bicycles", "Fahrrad", "n", "Fahrräder"),
)

PERSONAL = (
    Adjective("old", "alt", "older", "älter"),
    Adjective("young", "jung", "younger", "jünger"),
    Adjective("small", "klein", "smaller", "kleiner"),
    Adjective("tall", "groß", "taller", "größer"),
    Adjective("friendly", "freundlich"),
    Adjective("tired", "müde"),
    Adjective("happy", "glücklich"),
)
"""Adjectives of people."""

MATERIAL = (
    Adjective("old", "alt", "older", "älter"),
    Adjective("new", "neu", "newer", "neuer"),
    Adjective("small", "klein", "smaller", "kleiner"),
    Adjective("heavy", "schwer", "heavier", "schwerer"),
    Adjective("cheap", "billig", "cheaper", "billiger"),
    Adjective("beautiful", "schön"),
    Adjective("red", "rot"),
    Adjective("green", "grün"),
)
"""Adjectives of things."""

VERBS = {
    "thing": (
        Verb("buy buys bought", "kaufe kaufst kauft kaufen gekauft"),
        Verb("see sees saw", "sehe siehst sieht sehen gesehen"),
        Verb("find finds found", "finde findest findet finden gefunden"),
        Verb("sell sells sold", "verkaufe verkaufst verkauft verkaufen verkauft"),
        Verb("paint paints painted", "male malst malt malen gemalt"),
        Verb("look looks looked", "suche suchst sucht suchen gesucht", preposition="for"),
        Verb("pick picks picked", "hole holst holt holen geholt", prefix="ab", particle="up"),
        Verb("throw throws threw", "werfe wirfst wirft werfen geworfen", prefix="weg", particle="away"),
        Verb("bring brings brought", "bringe bringst bringt bringen gebracht", prefix="mit", particle="along"),
    ),
    "person": (
        Verb("visit visits visited", "besuche besuchst besucht besuchen besucht"),
        Verb("greet greets greeted", "grüße grüßt grüßt grüßen gegrüßt"),
        Verb("call calls called", "rufe rufst ruft rufen gerufen", prefix="an"),
        Verb("invite invites invited", "lade lädst lädt laden geladen", prefix="ein"),
        Verb("help helps helped", "helfe hilfst hilft helfen geholfen", case="dative"),
        Verb("thank thanks thanked", "danke dankst dankt danken gedankt", case="dative"),
    ),
    "giving": (
        Verb("give gives gave", "gebe gibst gibt geben gegeben"),
        Verb("show shows showed", "zeige zeigst zeigt zeigen gezeigt"),
        Verb("send sends sent", "schicke schickst schickt schicken geschickt"),
    ),
    "alone": (
        Verb("sleep sleeps slept", "schlafe schläfst schläft schlafen geschlafen"),
        Verb("work works worked", "arbeite arbeitest arbeitet arbeiten gearbeitet"),
        Verb("laugh laughs laughed", "lache lachst lacht lachen gelacht"),
        Verb("dance dances danced", "tanze tanzt tanzt tanzen getanzt"),
        Verb("arrive arrives arrived", "komme kommst kommt kommen gekommen", prefix="an", auxiliary="sein"),
        Verb("get gets got", "stehe stehst steht stehen gestanden", "auf", "up", auxiliary="sein"),
    ),
    "motion": (
        Verb("go goes went", "gehe gehst geht gehen gegangen", auxiliary="sein"),
        Verb("drive drives drove", "fahre fährst fährt fahren gefahren", auxiliary="sein"),
        Verb("come comes came", "komme kommst kommt kommen gekommen", "zurück", "back", auxiliary="sein"),
    ),
    "saying": (
        Verb("say says said", "sage sagst sagt sagen gesagt"),
        Verb("think thinks thought", "glaube glaubst glaubt glauben geglaubt"),
        Verb("know knows knew", "weiß weißt weiß wissen gewusst"),
        Verb("hope hopes hoped", "hoffe hoffst hofft hoffen gehofft"),
    ),
    "asking": (Verb("ask asks asked", "frage fragst fragt fragen gefragt"),),
    "trying": (
        Verb("try tries tried", "versuche versuchst versucht versuchen versucht"),
        Verb("forget forgets forgot", "vergesse vergisst vergisst vergessen vergessen"),
    ),
}
"""Verbs by their complement: a thing, a person, both, none, a direction, a clause, or an infinitive."""

WOMEN = ("Anna", "Maria", "Lena", "Julia")
MEN = ("Peter", "Paul", "Karl", "Felix")

NUMBERS = _pairs(
    "two zwei, three drei, four vier, five fünf, six sechs, seven sieben, eight acht, nine neun, "
    "twenty-one einundzwanzig, thirty-two zweiunddreißig, forty-three dreiundvierzig"
)

ROOMS = (
    Noun("garden", "", "Garten", "m", ""),
    Noun("park", "", "Park", "m", ""),
    Noun("kitchen", "", "Küche", "f", ""),
    Noun("school", "", "Schule", "f", ""),
    Noun("house", "", "Haus", "n", ""),
    Noun("village", "", "Dorf", "n", ""),
)
CITIES = _pairs("Berlin Berlin, Vienna Wien, Munich München, Prague Prag")

IN = {"m": "im", "f": "in der", "n": "im"}
INTO = {"m": "in den", "f": "in die", "n": "ins"}

DAYS = (
    Pair("on Monday", "am Montag"),
    Pair("on Friday", "am Freitag"),
    Pair("on Sunday", "am Sonntag"),
    Pair("in the evening", "am Abend"),
)
HOURS = tuple(Pair(f"at {number.english} o'clock", f"um {number.german} Uhr") for number in NUMBERS[:8])
TIMES = {
    "past": (Pair("yesterday", "gestern"), Pair("last week", "letzte Woche")),
    "present": (Pair("today", "heute"), Pair("now", "jetzt"), Pair("every day", "jeden Tag")),
    "future": (Pair("tomorrow", "morgen"), Pair("next week", "nächste Woche")),
}
"""Adverbials of one tense; days and hours suit all tenses."""

FREQUENCIES = _pairs("often oft, always immer, never nie, sometimes manchmal")

CONJUNCTIONS = _pairs("because weil, although obwohl, if wenn, before bevor")
QUESTIONS = _pairs("where wo, when wann, why warum")
DEGREES = (Pair("", ""), Pair("very", "sehr"), Pair("too", "zu"), Pair("not", "nicht"))
