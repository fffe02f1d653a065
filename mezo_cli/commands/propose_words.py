"""Propose label words: whole words of one token whose log-probability tells the labels of train apart, by forwards.

Half of the rows choose the words, and the other half says how well each choice does.
"""

import json
import shlex
from collections.abc import Iterator
from itertools import product

import numpy as np
import torch

from mezo_cli import data, models
from mezo_cli.config.schema import Config, Example
from mezo_cli.console import make_error_console, progress_bar
from mezo_cli.diagnosis.label_words import BATCH, chance_error, separation
from mezo_cli.errors import UserError, join
from mezo_cli.objectives import OBJECTIVES
from mezo_cli.process.memory import explain_device_errors
from mezo_cli.session.opening import opened
from mezo_cli.session.session import Session, not_finite_at_start, smaller_model
from mezo_cli.tasks.encoder import whole_words

ROWS, LEAST = 1000, 16  # rows of train that are read; of each label
WORDS, FIRST, BEST = 100, 10, 5  # words of a label; those that are combined, by their AUC; combinations that are shown


def propose(config: Config) -> Iterator[str]:
    """Yield lines to print: the best words of each label, and the best combinations as settings."""
    task, count = config.task, len(config.task.labels)
    lists = {key: words for key, words in task.lists(config.objective.per_label).items() if "words" in key}
    if not lists:
        raise UserError(f"--words: objective={config.objective.name} reads no label words; use objective=mlm or lm")
    key, now = next(((key, words) for key, words in lists.items() if words), [*lists.items()][-1])
    train, most = data.load_splits(config).train, ROWS // count
    order = np.random.RandomState(config.seed).permutation(len(train))
    of_each = [[train[i] for i in order if train[i].label == label][:most] for label in range(count)]
    for name, rows in zip(task.labels, of_each, strict=True):
        if len(rows) < LEAST:
            raise UserError(f"--words needs {LEAST} rows of each label in train; of '{name}' {len(rows)} can be read")
    chosen = [row for start in (0, 1) for rows in of_each for row in rows[start::2]]
    labels, half = np.array([row.label for row in chosen]), sum((len(rows) + 1) // 2 for rows in of_each)
    kind = OBJECTIVES.implementation(config.objective.name).model_kind
    accepted = list(whole_words(models.load_tokenizer(config.model, kind)))[:count]  # the task's may be refused
    task = task.replace(label_words=accepted, lm=task.lm.replace(label_words=[]))
    explained = explain_device_errors("reading rows of train", smaller_model(config))
    with explained, opened(config.replace(task=task)) as session:
        tokens = session.encoder.whole_words()
        scores, words = log_probabilities(session, chosen, list(tokens.values())), list(tokens)
    best, choices = choose_words(scores[:half], labels[:half])
    yield f"words of one token, the best of each label by {half} rows of train:"
    yield from (f"  {name}: {join(words[i] for i in of)}" for name, of in zip(task.labels, best, strict=True))
    yield f"the best choices, and the AUC of their scores on {len(chosen) - half} other rows (0.5 is chance), to paste:"
    of_task = [words.index(word) for word in now if word in tokens]
    for choice in [*choices, *([of_task] if len(of_task) == count else [])]:
        auc, error = separation(scores[half:][:, choice], labels[half:]), 1.96 * chance_error(labels[half:])
        made = json.dumps([words[i] for i in choice], ensure_ascii=False)
        line = f"{shlex.quote(f'{key}={made}')}{'  now' if choice == of_task else ''}"
        yield f"  {auc:.2f} ({max(0, auc - error):.2f} to {min(1, auc + error):.2f})  {line}"
    yield "The labels of train have chosen these words: a score before training with them has used labels."


def choose_words(scores: np.ndarray, labels: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
    """Return the best columns of scores, [rows, words], of each label, and combinations; of many labels equal ranks."""
    best: list[list[int]] = []
    for label in range(labels.max() + 1):
        is_label = labels == label
        above = scores[is_label].mean(axis=0) - scores[~is_label].mean(axis=0)
        likely = [word for word in np.argsort(-above)[:WORDS].tolist() if not any(word in words for words in best)]
        alone = [-separation(np.stack([-scores[:, word], scores[:, word]], axis=1), is_label) for word in likely]
        best.append([likely[i] for i in np.argsort(alone, kind="stable")[:FIRST]])
    combined = map(list, product(*best) if len(best) == 2 else zip(*best, strict=False))
    return best, sorted(combined, key=lambda words: -separation(scores[:, words], labels))[:BEST]


@torch.no_grad()
def log_probabilities(session: Session, rows: list[Example], tokens: list[int]) -> np.ndarray:
    """Return the log-probability of each token where the label word of a row stands, [rows, tokens]."""
    encoded, parts = session.encoder.encode_all(rows), []
    with progress_bar(make_error_console(), "rows", len(rows)) as report:
        for start in range(0, len(rows), BATCH):
            batch = session.objective.collate(encoded[start : start + BATCH])
            logits: torch.Tensor = session.objective.vocabulary_logits(batch)  # type: ignore[attr-defined]
            parts.append(logits.log_softmax(-1)[:, tokens].float().cpu().numpy())
            if not np.isfinite(parts[-1]).all():
                raise not_finite_at_start(session.config)
            report(min(start + BATCH, len(rows)))
    return np.concatenate(parts)
