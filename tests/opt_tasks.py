"""The tasks of the MeZO paper's OPT table: their rows in tests/fixtures/tasks, and their prompts written a second time.

The rows are of this project's own invention, in the format of the data sets on the hub. `expected` follows the table B1
of LARGE_MODELS.md, which was read from the released code (princeton-nlp/MeZO 552cb1b, large_models/templates.py).
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "fixtures" / "tasks"
WORDS = ["sst2", "rte", "cb", "boolq", "wsc", "wic", "multirc"]  # the candidates are words
CHOICES = [*WORDS, "copa", "record"]
GENERATED = ["squad", "drop"]
Row = dict[str, Any]


def rows(name: str) -> list[Row]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def _first_word_lower(text: str) -> str:
    return (
        text if text == "I" or text.startswith("I ") else text.split(" ")[0].lower() + text[len(text.split(" ")[0]) :]
    )


def expected(name: str, row: Row) -> tuple[str, list[str], list[str]]:
    """Return the prompt, what each candidate adds to it, and the right candidates (or the text that is trained)."""
    r = row
    if name == "sst2":
        words = [" terrible", " great"]
        return f"{r['sentence'].strip()} It was", words, [words[r["label"]]]
    if name == "rte":
        text = f'{r["sentence1"]}\nDoes this mean that "{r["sentence2"]}" is true? Yes or No?\n'
        return text, ["Yes", "No"], ["No" if "not" in r["label"] else "Yes"]
    if name == "cb":
        words = ["Yes", "No", "Maybe"]
        text = f'Suppose {r["premise"]} Can we infer that "{r["hypothesis"]}"? Yes, No, or Maybe?\n'
        return text, words, [words[r["label"]]]
    if name == "boolq":
        question = r["question"] if r["question"].endswith("?") else r["question"] + "?"
        text = f"{r['passage']} {question[0].upper() + question[1:]}\n"
        return text, ["Yes", "No"], ["Yes" if r["answer"] else "No"]
    no_yes = ["No", "Yes"]
    if name == "wsc":
        pronoun, noun = r["span2_text"].lower(), r["span1_text"]
        question = f'In the previous sentence, does the pronoun "{pronoun}" refer to {noun}? Yes or No?'
        return f"{r['text']}\n{question}\n", no_yes, [no_yes[r["label"]]]
    if name == "wic":
        question = f'Does the word "{r["word"]}" have the same meaning in these two sentences? Yes, No?'
        return f"{question}\n{r['sentence1']}\n{r['sentence2']}\n", no_yes, [no_yes[r["label"]]]
    if name == "multirc":
        question = f'Question: {r["question"]}\nI found this answer "{r["answer"]}". Is that correct? Yes or No?'
        return f"{r['paragraph']}\n{question}\n", no_yes, [no_yes[r["label"]]]
    if name == "copa":
        premise = r["premise"].rstrip().removesuffix(".")
        choices = [" " + _first_word_lower(r["choice1"]), " " + _first_word_lower(r["choice2"])]
        return f"{premise} {'so' if r['question'] == 'effect' else 'because'}", choices, [choices[r["label"]]]
    if name == "record":
        queries = {entity: " " + r["query"].replace("@placeholder", entity) for entity in r["entities"]}
        text = r["passage"].replace("@highlight\n", "- ") + "\n-"
        return text, list(queries.values()), [queries[answer] for answer in r["answers"]]
    if name == "squad":
        text = f"Title: {r['title']}\nContext: {r['context']}\nQuestion: {r['question'].strip()}\nAnswer:"
        return text, [], [f" {r['answers']['text'][0]}\n"]
    assert name == "drop"
    text = f"Passage: {r['passage']}\nQuestion: {r['question'].strip()}\nAnswer:"
    return text, [], [f" {r['answers_spans']['spans'][0]}\n"]
