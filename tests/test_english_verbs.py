"""The verb table of the quickstart: its format, and its English.

Regular forms are derived here from spelling rules; what the rules cannot know (stress, odd spellings) stands in the
tables below.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[1] / "recipes" / "data" / "english_verbs.tsv"
HEADER = ["lemma", "third_person", "past", "past_participle", "present_participle", "class"]

# More than one syllable, the last one stressed and ending in one vowel letter and one consonant: it is doubled.
STRESSED_LAST = """
    abet abhor abut acquit admit allot annul aver bedim befit befog bestir commit compel concur confer control debar
    debug defer defog demur deter disbar disinter dispel embed emit entrap equip excel expel extol impel incur infer
    inter nonplus occur omit outfit outgun outstrip outwit overlap overstep patrol permit prefer propel readmit
    rebel rebut recap recur refer regret remit repel submit transfer transmit transship unclog underpin unpin unplug
    unwrap unzip
"""
# Not stressed there, but spelled as if they were: compounds, and verbs whose last syllable keeps a full vowel.
DOUBLED_ANYWAY = """
    bootleg catnap eavesdrop format handicap hobnob kidnap leapfrog program reformat sidestep wiretap zigzag
"""
DOUBLED_OR_NOT = """
    backpedal barrel bedevil benefit bevel bias bus cancel carol channel chisel combat counsel cudgel diagram dial
    dishevel disembowel drivel duel empanel enamel equal focus fuel funnel gambol gravel grovel hiccup imperil
    initial label leaflet level libel marshal marvel mislabel model panel parcel pedal pencil pummel quarrel ravel
    refuel relabel remodel revel ricochet rival shovel shrivel signal snivel spiral stencil swivel tassel total
    towel travel tunnel unravel worship yodel
"""
C_TO_CK = {"bivouac", "frolic", "mimic", "panic", "picnic", "shellac", "traffic"}
THIRD_PERSON_EXCEPTIONS = {
    "be": "is", "have": "has", "stomach": "stomachs", "quiz": "quizzes", "whiz": "whizzes", "gas": "gases|gasses",
    "bus": "buses|busses", "bias": "biases|biasses", "focus": "focuses|focusses", "nonplus": "nonpluses|nonplusses",
    "taxi": "taxis|taxies", "radio": "radios", "video": "videos", "solo": "solos", "zero": "zeroes|zeros",
    "lasso": "lassoes|lassos",
}  # fmt: skip
PRESENT_PARTICIPLE_EXCEPTIONS = {
    "be": "being", "singe": "singeing", "tinge": "tingeing|tinging", "binge": "bingeing|binging",
    "whinge": "whingeing|whinging", "age": "aging|ageing", "route": "routing|routeing", "queue": "queuing|queueing",
    "cue": "cueing|cuing", "eye": "eyeing|eying", "taxi": "taxiing|taxying", "stymie": "stymieing|stymying",
}  # fmt: skip
# lemma past participle: the verbs any list of irregular verbs begins with, and the ones that are easily got wrong.
PRINCIPAL_PARTS = """
    arise arose arisen / be was|were been / bear bore borne / beat beat beaten / become became become / begin began
    begun / bet bet bet / bind bound bound / bite bit bitten / bleed bled bled / blow blew blown / break broke
    broken / bring brought brought / build built built / buy bought bought / catch caught caught / choose chose
    chosen / cling clung clung / come came come / cost cost cost / creep crept crept / cut cut cut / deal dealt
    dealt / dig dug dug / do did done / draw drew drawn / dream dreamed|dreamt dreamed|dreamt / drink drank drunk /
    drive drove driven / eat ate eaten / fall fell fallen / feed fed fed / feel felt felt / fight fought fought /
    find found found / flee fled fled / fling flung flung / fly flew flown / forbid forbade forbidden / forget
    forgot forgotten / forgive forgave forgiven / forsake forsook forsaken / freeze froze frozen / get got
    got|gotten / give gave given / go went gone / grind ground ground / grow grew grown / hang hung|hanged
    hung|hanged / have had had / hear heard heard / hide hid hidden / hit hit hit / hold held held / keep kept kept
    / kneel knelt knelt / know knew known / lay laid laid / lead led led / learn learned|learnt learned|learnt /
    leave left left / lend lent lent / let let let / lie lay lain / light lit lit / lose lost lost / make made made
    / mean meant meant / meet met met / mistake mistook mistaken / mow mowed mown / overcome overcame overcome / pay
    paid paid / prove proved proven / put put put / quit quit quit / read read read / ride rode ridden / ring rang
    rung / rise rose risen / run ran run / saw sawed sawn / say said said / see saw seen / seek sought sought / sell
    sold sold / send sent sent / set set set / sew sewed sewn / shake shook shaken / shed shed shed / shine shone
    shone / shoot shot shot / show showed shown / shrink shrank shrunk / shut shut shut / sing sang sung / sink sank
    sunk / sit sat sat / slay slew slain / sleep slept slept / slide slid slid / slit slit slit / smite smote
    smitten / sow sowed sown / speak spoke spoken / speed sped sped / spend spent spent / spin spun spun / spit spat
    spat / split split split / spread spread spread / spring sprang sprung / stand stood stood / steal stole stolen
    / stick stuck stuck / sting stung stung / stink stank stunk / stride strode stridden / strike struck struck /
    string strung strung / strive strove striven / swear swore sworn / sweep swept swept / swell swelled swollen /
    swim swam swum / swing swung swung / take took taken / teach taught taught / tear tore torn / tell told told /
    think thought thought / throw threw thrown / thrust thrust thrust / tread trod trodden / undergo underwent
    undergone / understand understood understood / wake woke woken / wear wore worn / weave wove woven / weep wept
    wept / win won won / wind wound wound / withdraw withdrew withdrawn / withhold withheld withheld / wring wrung
    wrung / write wrote written
"""


def read_table() -> list[list[str]]:
    return [line.split("\t") for line in TABLE.read_bytes().decode("utf-8").split("\n")[1:-1]]


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(HEADER, row, strict=True)) for row in read_table()}


def syllables(lemma: str) -> int:
    # The u of "qu" is no vowel, nor is a y before a vowel; good enough for words that do not end in e.
    return len(re.findall(r"[aeiou]+|(?<=[^aeiou])y", lemma.replace("qu", "q")))


def stems(lemma: str, doubles_when_long: bool) -> set[str]:
    if lemma in C_TO_CK:
        return {lemma + "k"}
    if lemma in DOUBLED_OR_NOT.split():
        return {lemma, lemma + lemma[-1]}
    closed = re.search(r"(?:^|[^aeiou])[aeiouy][^aeiouyhwx]$", lemma.replace("qu", "q")) is not None and lemma != "sync"
    long = syllables(lemma) > 1
    if closed and (not long or doubles_when_long or lemma in (STRESSED_LAST + DOUBLED_ANYWAY).split()):
        return {lemma + lemma[-1]}
    return {lemma}


def regular_past(lemma: str, doubles_when_long: bool = False) -> set[str]:
    if lemma.endswith("e"):
        return {lemma + "d"}
    if re.search("[^aeiou]y$", lemma):
        return {lemma[:-1] + "ied"}
    return {stem + "ed" for stem in stems(lemma, doubles_when_long)}


def third_person(lemma: str) -> set[str]:
    if lemma in THIRD_PERSON_EXCEPTIONS:
        return set(THIRD_PERSON_EXCEPTIONS[lemma].split("|"))
    if re.search("(s|x|z|ch|sh|[^o]o)$", lemma):
        return {lemma + "es"}
    if re.search("[^aeiou]y$", lemma):
        return {lemma[:-1] + "ies"}
    return {lemma + "s"}


def present_participle(lemma: str, doubles_when_long: bool) -> set[str]:
    if lemma in PRESENT_PARTICIPLE_EXCEPTIONS:
        return set(PRESENT_PARTICIPLE_EXCEPTIONS[lemma].split("|"))
    if lemma.endswith("ie"):
        return {lemma[:-2] + "ying"}
    if re.search("[^eoy]e$", lemma):
        return {lemma[:-1] + "ing"}
    if lemma.endswith("e"):
        return {lemma + "ing"}
    return {stem + "ing" for stem in stems(lemma, doubles_when_long)}


def test_file_format() -> None:
    raw = TABLE.read_bytes()
    assert b"\r" not in raw and not raw.startswith(b"\xef\xbb\xbf") and raw.endswith(b"\n")
    assert raw.decode("utf-8").split("\n")[0].split("\t") == HEADER
    rows = read_table()
    assert len(rows) >= 1600
    for row in rows:
        assert len(row) == len(HEADER), row
        assert re.fullmatch("[a-z]+", row[0]), row
        for cell in row[1:5]:
            forms = cell.split("|")
            assert all(re.fullmatch("[a-z]+", form) for form in forms), row
            assert len(set(forms)) == len(forms), row
        assert row[5] in {"regular", "irregular", "mixed"}, row


def test_lemmas_are_sorted_and_unique() -> None:
    lemmas = [row[0] for row in read_table()]
    assert lemmas == sorted(set(lemmas))


def test_readme_counts_are_true(table: dict[str, dict[str, str]]) -> None:
    text = (TABLE.parent / "README.md").read_text(encoding="utf-8")
    counts = {name: sum(row["class"] == name for row in table.values()) for name in ("regular", "irregular", "mixed")}
    assert f"{len(table):,} English verbs" in text
    assert f"{counts['regular']:,} regular, {counts['irregular']} irregular, {counts['mixed']} with both" in text


def test_regular_verbs_follow_the_rules(table: dict[str, dict[str, str]]) -> None:
    wrong = []
    for lemma, row in table.items():
        if row["class"] != "regular":
            continue
        expected = {"past": regular_past(lemma), "past_participle": regular_past(lemma)}
        wrong += [(lemma, row[column]) for column, forms in expected.items() if set(row[column].split("|")) != forms]
    assert not wrong


def test_present_forms_follow_the_rules(table: dict[str, dict[str, str]]) -> None:
    wrong = []
    for lemma, row in table.items():
        # Irregular verbs of several syllables are stressed or compounded on the last one (begin, upset, input).
        expected = {
            "third_person": third_person(lemma),
            "present_participle": present_participle(lemma, row["class"] != "regular"),
        }
        wrong += [(lemma, row[column]) for column, forms in expected.items() if set(row[column].split("|")) != forms]
    assert not wrong


def test_class_says_what_the_forms_are(table: dict[str, dict[str, str]]) -> None:
    for lemma, row in table.items():
        forms = set(row["past"].split("|")) | set(row["past_participle"].split("|"))
        is_regular = {form in regular_past(lemma, row["class"] != "regular") for form in forms}
        assert (
            row["class"]
            == {(True,): "regular", (False,): "irregular", (False, True): "mixed"}[tuple(sorted(is_regular))]
        ), lemma


def test_exception_tables_are_in_use(table: dict[str, dict[str, str]]) -> None:
    doubling = (STRESSED_LAST + DOUBLED_ANYWAY + DOUBLED_OR_NOT).split()
    assert {*doubling, *C_TO_CK, *THIRD_PERSON_EXCEPTIONS, *PRESENT_PARTICIPLE_EXCEPTIONS} <= set(table)


def test_principal_parts_of_common_irregular_verbs(table: dict[str, dict[str, str]]) -> None:
    verbs = [entry.split() for entry in PRINCIPAL_PARTS.split("/")]
    assert len(verbs) > 130
    for lemma, past, participle in verbs:
        assert set(past.split("|")) <= set(table[lemma]["past"].split("|")), lemma
        assert set(participle.split("|")) <= set(table[lemma]["past_participle"].split("|")), lemma


def test_prefixed_irregular_verbs_inflect_like_their_base(table: dict[str, dict[str, str]]) -> None:
    prefixes = ("mis", "out", "over", "re", "un", "under", "fore", "up", "inter", "with", "be", "for")
    checked = 0
    for lemma, row in table.items():
        for prefix in prefixes:
            base = lemma[len(prefix) :]
            if lemma.startswith(prefix) and row["class"] == "irregular" and base in table:
                if table[base]["class"] == "regular":
                    continue
                checked += 1
                theirs = {prefix + form for form in table[base]["past"].split("|")}
                assert set(row["past"].split("|")) & theirs, lemma
    assert checked > 100
