"""The wordings of the sample: how each fact is asked and, in the instructions, answered."""

# Questions read as if nothing but the text were shown: the options are scored, not listed.
MCQA = {
    "capital": (
        "What is the capital of {}?",
        "What is the capital city of {}?",
        "Which city is the capital of {}?",
    ),
    "city_country": (
        "In which country is the city of {}?",
        "Which country is {} located in?",
        "{} is a city in which country?",
    ),
    "city_pair": (
        "Which country are the cities {} and {} in?",
        "In which country would you visit both {} and {}?",
    ),
    "us_state": (
        "In which US state is the city of {}?",
        "Which US state is {} located in?",
    ),
    "symbol_element": (
        "Which chemical element has the symbol {}?",
        "What element does the chemical symbol {} stand for?",
    ),
    "state_code": ("Which US state has the postal abbreviation {}?",),
    "county_state": ("Which US state is {} in?", "{} is part of which US state?"),
    "largest_city": (
        "What is the largest city in {}?",
        "Which city in {} has the most inhabitants?",
    ),
}

OPEN = {
    "capital_country": (
        "{} is the capital of which country?",
        "Which country has {} as its capital?",
    ),
    "city_country": (
        "What country would you be in if you stood in the city of {}?",
        "To which country does the city of {} belong?",
    ),
    "city_pair": (
        "{} and {} are both cities of one country; which one?",
        "Name the country that has the cities {} and {}.",
    ),
    "us_state": (
        "What US state would you travel to if you were going to {}?",
        "The American city of {} belongs to which state?",
    ),
    "element_symbol": (
        "What is the chemical symbol of {}?",
        "How is the element {} abbreviated in the periodic table?",
    ),
    "domain_country": (
        "Which country does the internet domain {} belong to?",
        "Websites ending in {} belong to which country?",
    ),
    "element_number": (
        "What is the name of element number {} in the periodic table?",
        "Name the element whose atoms carry {} protons.",
    ),
    "iso_country": (
        "Which country has the three-letter ISO code {}?",
        "What country does the ISO 3166 code {} mean?",
    ),
    "county_state": (
        "What US state would you visit to see {}?",
        "The American county named {} lies in which state?",
    ),
    "state_largest": (
        "What is the most populous city in the US state of {}?",
        "Name the largest city of the US state of {}.",
    ),
}

# (instruction, input, output)
INSTRUCTIONS = {
    "currency": (
        ("Which currency is used in {the}?", "", "{The} uses the {lower} ({code})."),
        ("Name the currency of the given country.", "{name}", "{money}"),
        ("I am travelling to {the}. What money should I bring?", "", "Bring {code}, the {lower}."),
        ("Give the currency of {the} as JSON.", "", '{{"currency": "{money}", "code": "{code}"}}'),
        ("Reply with the three-letter currency code only.", "{name}", "{code}"),
        ("Tell me the currency code of {the}.", "", "{code}"),
        (
            "Fill in the blank.",
            "In {the}, prices are written in ____.",
            "In {the}, prices are written in {code}, the {lower}.",
        ),
        ("List the name and code of the money of {the}.", "", "- Name: {money}\n- Code: {code}"),
        ("What do people in {the} pay with?", "", "They pay with the {lower}."),
    ),
    "continent": (
        ("On which continent is {the}?", "", "{continent}"),
        ("Name the continent of this country.", "{name}", "{continent}"),
        ("Is {the} in {continent}?", "", "Yes, {the} is in {continent}."),
        ("Is {the} in {wrong}?", "", "No, {the} is in {continent}, not in {wrong}."),
        ("Where in the world is {the}? Answer in a sentence.", "", "{The} is in {continent}."),
        ("Pick the continent that {the} is part of.", "{three}", "{continent}"),
        ("Describe {the} as JSON with its continent.", "",
         '{{"country": "{name}", "continent": "{continent}"}}'),
        ("Correct the sentence if it is wrong.", "{The} is in {wrong}.",
         "{The} is in {continent}."),
        ("True or false: {the} is in {wrong}.", "", "False. The right continent is {continent}."),
        ("Say which continent one reaches when landing in {the}.", "", "One lands in {continent}."),
    ),
    "calling_code": (
        ("What is the calling code of {the}?", "", "+{phone}"),
        ("Give the dialling prefix for phone calls to this country.", "{name}", "+{phone}"),
        ("How do I start a phone number in {the} when I call from abroad?", "",
         "Start with +{phone}."),
        ("Which country has the calling code +{phone}?", "", "+{phone} is the code of {the}."),
        ("Whose calling code is this?", "+{phone}", "{name}"),
        ("Write the calling code of {the} as JSON.", "",
         '{{"country": "{name}", "calling_code": "+{phone}"}}'),
        ("A friend in {the} asks for a call. Which prefix do I dial?", "", "Dial +{phone} first."),
        ("A missed call began with +{phone}. Where did it come from?", "", "It came from {the}."),
        ("Complete the phone book entry.", "{name}: +__", "{name}: +{phone}"),
    ),
    "neighbours": (
        ("Which countries share a land border with {the}?", "", "{The} borders {sentence}."),
        ("List the neighbours of {the}, one on each line.", "", "{lines}"),
        ("How many countries border {the}?", "", "{count}"),
        ("Does {the} share a land border with {one_the}?", "",
         "Yes, {one_the} is a neighbour of {the}."),
        ("Does {the} share a land border with {wrong_the}?", "",
         "No. {The} borders {sentence}."),
        ("Give the neighbouring countries as a JSON list.", "{name}", "{json}"),
        ("Which of these countries borders {the}?", "{three}", "{one}"),
        ("Count the neighbours of this country and name them.", "{name}", "{count}: {commas}"),
        ("Name one country that borders {the}.", "", "{one}"),
        ("I leave {the} by road. Where can I arrive?", "", "You can arrive in {sentence}."),
    ),
    "language": (
        ("What is the main language of {the}?", "", "{language}"),
        ("Name the language most used in this country's public life.", "{name}", "{language}"),
        ("I am moving to {the}. Which language should I learn?", "",
         "You should learn {language}."),
        ("Which language do the newspapers of {the} mostly use?", "",
         "They are mostly written in {language}."),
        ("Answer with JSON.", "Main language of {the}?", '{{"language": "{language}"}}'),
        ("Complete the sentence.", "Most people in {the} speak",
         "Most people in {the} speak {language}."),
        ("In a few words, what would a radio host in {the} speak?", "", "Most likely {language}."),
        ("Is {language} the main language of {the}?", "", "Yes, {language} is its main language."),
    ),
    "time_zone": (
        ("What is the time zone name of {city} in the IANA database?", "", "{zone}"),
        ("Give the IANA time zone of this city.", "{city}", "{zone}"),
        ("Which setting should a computer in {city} use for its clock?", "",
         "It should use the time zone {zone}."),
        ("Write the clock settings of {city} as JSON.", "", '{{"timezone": "{zone}"}}'),
        ("Split the IANA time zone of {city} into area and location.", "",
         "- Area: {area}\n- Location: {place}"),
        ("Which city names the time zone that {city} uses?", "", "{place}"),
        ("Write the line that sets TZ for a server in the given city.", "{city}", "TZ={zone}"),
        ("My meeting is in {city}. Which time zone do I choose in my calendar?", "",
         "Choose {zone}."),
    ),
}  # fmt: skip


def comparison(thing: str, what: str, more: str, most: str, least: str, unit: str) -> tuple:
    """Return the wordings that compare and sort by one quantity."""
    return (
        (f"Which has {more}, {{a}} or {{b}}?", "", "{more}"),
        (f"Compare {{a}} and {{b}} by {what} in one sentence.", "",
         f"{{More}} comes first with about {{v_more}}{unit}, ahead of {{less_in}} with about "
         f"{{v_less}}{unit}."),
        (f"Sort these {thing} by {what}, highest first.", "{names}", "{down}"),
        (f"Does {{a}} have {more} than {{b}}?", "",
         f"{{yes}}. {{More}} has about {{v_more}}{unit}, {{less_in}} about {{v_less}}{unit}."),
        (f"Which of these {thing} has {most}?", "{names}", "{top}"),
        (f"Rank the {thing} by {what} in a numbered list, highest first.", "{names}", "{steps}"),
        (f"Put the {thing} in ascending order of {what}.", "{names}", "{up}"),
        (f"Return a JSON list of the {thing}, ordered from {most} to {least}.", "{names}",
         "{json}"),
        (f"Which one has {least}?", "{names}", "{bottom}"),
        (f"Estimate the {what} of {{more_in}}.", "", f"About {{v_more}}{unit}."),
        (f"Say whether {{a}} or {{b}} has {more}, with figures.", "",
         f"{{More}}: about {{v_more}}{unit} against {{v_less}}{unit}."),
        (f"Show the order by {what} with > signs: {{names}}.", "", "{chain}"),
    )  # fmt: skip


COMPARISONS = {
    "population": comparison(
        "countries", "population", "more inhabitants", "the most inhabitants",
        "the fewest inhabitants", " people",
    ),
    "area": comparison(
        "countries", "area", "a larger area", "the largest area", "the smallest area",
        " square kilometres",
    ),
    "latitude": comparison(
        "cities", "latitude", "a more northern position", "the northernmost position",
        "the southernmost position", " degrees",
    ),
    "mass": comparison(
        "elements", "atomic mass", "heavier atoms", "the heaviest atoms",
        "the lightest atoms", " u",
    ),
    "density": comparison(
        "elements", "density", "a higher density", "the highest density", "the lowest density",
        " g per cubic centimetre",
    ),
}  # fmt: skip
