"""Abbreviations whose full stop does not end a sentence, by language; single letters need not be here."""

ABBREVIATIONS = {
    language: frozenset(words.split())
    for language, words in {
        "": "dr prof st",
        "en": "mr mrs ms messrs dr prof st gen col capt lt sgt maj cmdr rev hon gov sen rep pres supt mt ft vs viz "
        "cf approx ca inc ltd co corp bros dept est al ave blvd rd",
        "de": "dr prof hr fr frl dipl ing st str bzw vgl ca evtl ggf inkl exkl zzgl sog bspw max min mind geb gest "
        "gegr jh jhd mio mrd tel abs art aufl bd hrsg verf zit ebd",
        "fr": "mm mme mlle mgr me dr pr st ste cf ex env av apr tél vol chap",
        "es": "sr sra srta sres dr dra prof lic ing ud uds vd vds d dña av avda pág cía gral cnel aprox",
        "it": "sig sigg dott dr prof avv ing arch on rag geom st cfr pag es ca sen",
        "pt": "sr sra srta dr dra prof eng exmo exma av pág aprox ltda cia",
        "nl": "dhr mevr mw dr drs ir mr prof st bijv bv ca enz evt incl excl resp zgn blz jl",
        "sv": "dr prof st bl ca dvs etc fr hr kl resp t.ex jfr",
        "da": "dr prof hr fr frk st bl ca dvs evt f.eks kl jf",
        "nb": "dr prof st bl ca dvs evt f.eks kl jf hr fr",
        "fi": "esim ks mm nk prof tri ts vrt yms",
        "pl": "dr prof mgr inż hab św ul al np tzn tzw tj im ks wg zob",
        "cs": "dr prof ing mgr bc doc st sv např tzn tzv tj resp ul čl srov",
        "sk": "dr prof ing mgr bc doc sv napr tzn tzv tj resp ul čl porov",
        "hu": "dr prof id ifj pl kb ún ill stb vö",
        "ro": "dl dna dra dr prof ing str bd nr cca",
        "tr": "dr prof doç sn av yrd örn bkz vb vs cad sok mah",
        "ru": "г гг ул пр просп пл им др проф акад гр тов стр рис табл см ср млн млрд тыс руб коп напр св",
        "uk": "м вул пл ім др проф акад стор рис табл див пор млн млрд тис грн напр св",
        "el": "κ κκ κα δρ καθ π.χ βλ αρ σελ",
    }.items()
}
"""Lower case, without the last full stop; those of "" are everywhere. A word is left out that as often ends a sentence
as not, as etc."""

BEFORE_NUMBERS = (
    "no nos nr núm num n.º nº art arts abb abs bd bl ch chap fig figs ex eq sec sect tab vol p pp pg pag pág s str kap "
    "teil ca rs jan feb mar apr jun jul aug sep sept oct okt nov dec dez № рис стр табл гл"
)
"""Words whose full stop does not end a sentence where a number follows, in any language: No. 5, Fig. 2, Jan. 1."""

ORDINALS = "de da nb nn sv fi is et lv cs sk sl hr sr bs hu pl tr eu lb hsb"
"""Languages that write a full stop behind ordinal numbers: am 3. Oktober, Friedrich II."""

_THREE_LETTERS = (
    "eng en deu de ger de fra fr fre fr spa es ita it por pt nld nl dut nl swe sv dan da nob nb nor nb fin fi pol pl "
    "ces cs cze cs slk sk slo sk hun hu ron ro rum ro tur tr rus ru ukr uk ell el gre el"
)
_NAMES = (
    "english en german de french fr spanish es italian it portuguese pt dutch nl swedish sv danish da norwegian nb "
    "finnish fi polish pl czech cs slovak sk hungarian hu romanian ro turkish tr russian ru ukrainian uk greek el"
)
_OTHERS = f"{_THREE_LETTERS} {_NAMES} no nb".split()
CODES = dict(zip(_OTHERS[::2], _OTHERS[1::2], strict=True))
"""Other codes and the English names of these languages."""
