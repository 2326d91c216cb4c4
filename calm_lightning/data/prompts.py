"""Text only: what the model reads, and what stands between the prompt and the response.

A form is a pair (prompt, lead): the model reads `prompt` and is taught or asked `lead + response`.
Blanks at the ends of a field are not content and are stripped; everything else stays verbatim.
"""

import string
from typing import NamedTuple

# Stanford Alpaca's prompts, a protocol of that project: verbatim `PROMPT_DICT` in train.py of
# github.com/tatsu-lab/stanford_alpaca (Apache-2.0). As there, no blank precedes the response.
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
ALPACA_NO_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
FORMS = ("alpaca", "question", "chat")
QUESTION = "Question: {question}\nAnswer:"

# Real rows of Alpaca say "there is no input" in words: "Noinput", "<no input>", "\\<noinput\\>",
# "`<noinput>`", "No input required.". An input whose letters spell one of these is no input;
# "Joe Smith \n<noinput>" holds more, so it is data and stays.
NO_INPUT_LETTERS = frozenset({"noinput", "noinputrequired"})


class Prompt(NamedTuple):
    """A rendered prompt, what joins it to its response, and whether the tokenizer adds its BOS.

    A chat template writes BOS itself, so `special` is False there: a second BOS shifts everything.
    """

    text: str
    lead: str
    special: bool


def is_no_input_marker(text: str) -> bool:
    """Tell whether a non-empty `input` only says that there is none."""
    return "".join(c for c in text.lower() if c.isalpha()) in NO_INPUT_LETTERS


def question(text: str) -> Prompt:
    """Render the plain form; the response is `" " + text`."""
    return Prompt(QUESTION.format(question=text.strip()), " ", True)


def chat(tokenizer, text: str) -> Prompt:
    """Render one user turn with the tokenizer's chat template; ValueError if it has none."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no chat "
            'template; use form "question" or give the tokenizer one.'
        )
    turn = [{"role": "user", "content": text.strip()}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return Prompt(text, "", False)


def instruction(form: str, tokenizer, instruction: str, input: str) -> Prompt:
    """Render an Alpaca row in one of FORMS; `input` may be empty."""
    instruction, input = instruction.strip(), input.strip()
    if form == "alpaca":
        template = ALPACA_WITH_INPUT if input else ALPACA_NO_INPUT
        return Prompt(template.format(instruction=instruction, input=input), "", True)
    text = f"{instruction}\n{input}" if input else instruction
    if form == "question":
        return question(text)
    return chat(tokenizer, text)


def lettered(text: str, options: list[str]) -> str:
    """Put lettered options under a question; ValueError beyond 26 options."""
    if len(options) > len(string.ascii_uppercase):
        raise ValueError(f"{len(options)} options: there are letters for 26 at most.")
    lines = [f"{string.ascii_uppercase[i]}. {option}" for i, option in enumerate(options)]
    return "\n".join([text.strip(), *lines])
