"""Check the label words on dev rows before training: their tokens, what the model itself writes there, what they tell.

A prompt can be biased (nearly all rows get one label) and still informative: then the score of the label words puts
the rows in the right order, only around the wrong threshold, which a few steps of training move. The AUC of the score
tells this from a prompt that says nothing.
"""

from typing import NamedTuple

import numpy as np
import torch

from mezo_cli.config.schema import TokenizedExample
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Deadline, Section, percent
from mezo_cli.objectives.classification import Classification
from mezo_cli.session.opening import Prepared
from mezo_cli.session.session import Session, not_finite_at_start
from mezo_cli.tasks.encoder import PROPOSE

BATCH = 16  # rows per forward; small, so that the time limit is kept
TOP = 10
RARE = 1e-3  # probability of all label words together; below it the prompt does not ask for them
BIAS = 0.25  # a label's part of the predictions above its part of the rows
MARGIN = 0.05  # of the AUC above 0.5; more where few rows leave it uncertain
TELLS = 0.15  # two standard errors of chance; above it an AUC of a useful prompt and one of chance are not told apart


class Scores(NamedTuple):
    """Scores of rows."""

    labels: np.ndarray  # [rows]
    scores: np.ndarray  # of the classes, or log-probabilities of the label words, [rows, labels]
    words: np.ndarray | None = None  # mean probability of every word, [words]; None: the objective scores no words


def check(prepared: Prepared, deadline: Deadline) -> Section:
    """Check the label words on as many dev rows as the time allows."""
    section, session = Section("label words"), prepared.session
    seen = score_rows(session, prepared.rows["dev"], deadline)
    _report_words(section, session, seen)
    start = ""  # why nothing is expected of the scores
    if session.config.init == "linear_probe":
        start = "init=linear_probe fits the output layer before the first step: this and the signal below are of before"
    elif session.objective.model_kind.has_classifier and session.loaded.fresh:
        start = "the classification head is new, drawn from the seed: its scores say nothing before training"
    if start:
        section.add(OK, "start", start)
    judge_scores(section, session.config.task.labels, seen, bool(start))
    return section


@torch.no_grad()
def score_rows(session: Session, rows: list[TokenizedExample], deadline: Deadline) -> Scores:
    """Score rows in a random order that the seed draws, until all are scored or the time is up."""
    objective, order = session.objective, np.random.RandomState(session.config.seed).permutation(len(rows))
    assert isinstance(objective, Classification)
    scores: list[np.ndarray] = []
    words: torch.Tensor | None = None
    for start in range(0, len(order), BATCH):
        before, chosen = deadline.left, order[start : start + BATCH]
        batch = objective.collate([rows[i] for i in chosen])
        vocabulary = objective.vocabulary_logits(batch)
        of_labels = objective.logits(batch)
        if not bool(of_labels.isfinite().all()):
            raise not_finite_at_start(session.config)
        scores.append(of_labels.cpu().numpy())
        if vocabulary is not None:
            words = vocabulary.softmax(-1).sum(dim=0) + (0 if words is None else words)
        if not deadline.allows(before - deadline.left):
            break
    joined = np.concatenate(scores)
    labels = np.array([rows[i].label for i in order[: len(joined)]])
    return Scores(labels, joined, None if words is None else (words / len(joined)).float().cpu().numpy())


def _report_words(section: Section, session: Session, seen: Scores) -> None:
    names, ids = session.config.task.labels, session.encoder.label_ids
    tokens = [list(word) if isinstance(word, (list, tuple)) else [int(word)] for word in ids]
    if not tokens:
        section.add(OK, "tokens", f"objective={session.config.objective.name} scores classes, not words")
        return
    shown = [f"{' '.join(_show(session, token) for token in ids)} (token {', '.join(map(str, ids))})" for ids in tokens]
    text = "; ".join(f"{name} is {words}" for name, words in zip(names, shown, strict=True))
    section.add(OK, "tokens", text, tokens=dict(zip(names, tokens, strict=True)))
    if seen.words is None:
        return
    probability, rows = seen.words, len(seen.labels)
    top = [(int(token), float(probability[token])) for token in np.argsort(-probability)[:TOP]]
    words = ", ".join(f"{_show(session, token)} {percent(p)}" for token, p in top)
    text = f"the model's own top {len(top)} words there (mean over {rows:,} dev rows): {words}"
    shown_top = [{"token": token, "word": _show(session, token)[1:-1], "probability": p} for token, p in top]
    section.add(OK, "top_words", text, top=shown_top, rows=rows)
    total = float(probability[sorted({ids[0] for ids in tokens})].sum())
    text = f"the label words have {percent(total)} of the probability there"
    advice = "the prompt does not ask for these words: choose words that the model itself writes there, or change"
    section.judge("label_word_share", total < RARE, text, f"{advice} task.template; {PROPOSE}", share=total)


def _show(session: Session, token: int) -> str:
    """Return a token as text in quotes, without the space that belongs to it."""
    text = str(session.encoder.tokenizer.decode([token]))
    return "'" + (text.strip() or text).replace("\n", "\\n") + "'"


def judge_scores(section: Section, names: list[str], seen: Scores, untrained: bool) -> None:
    """Judge the balance of the predictions of dev rows, and whether the scores tell the labels apart.

    `untrained`: the scores are those of a part that is new, so nothing is expected of them.
    """
    labels = seen.labels
    if len(np.unique(labels)) < 2:
        text = f"no score can be judged: all of {len(labels):,} dev rows are labelled '{names[labels[0]]}'"
        section.add(UNKNOWN, "auc", text, "give dev rows of every label, or more --seconds")
        return
    _judge_balance(section, names, seen, untrained)
    value, error = separation(seen.scores, labels), chance_error(labels)
    needed, verdict, advice = max(MARGIN, 2 * error), OK, ""
    if untrained:
        judged = "of these scores, before training"
    elif value >= 0.5 + needed:
        judged = "the score tells the labels apart"
    elif value <= 0.5 - needed:
        verdict, judged = DOUBT, "the score orders the labels the wrong way round"
        advice = "check that task.label_words are in the order of task.labels, and how the labels of the data are read"
    elif 2 * error > TELLS:
        counts = np.bincount(labels, minlength=len(names))
        few = f"{counts.min():,} of '{names[int(counts.argmin())]}'"
        verdict, judged = UNKNOWN, f"too few rows to tell whether the score tells the labels apart ({few})"
        advice = "give more dev rows of every label, or more --seconds if dev has them"
    else:
        verdict, judged = DOUBT, "the score hardly tells the labels apart"
        advice = f"try other words (task.label_words; {PROPOSE}) or another prompt (task.template)"
    text = f"{judged}: AUC {value:.2f} (0.5 is chance, +-{2 * error:.2f} for {len(labels):,} rows)"
    section.add(verdict, "auc", text, advice, auc=value, chance_error=error, rows=len(labels))


def _judge_balance(section: Section, names: list[str], seen: Scores, untrained: bool) -> None:
    rows, answers = len(seen.labels), seen.scores.argmax(axis=1)
    predicted, actual = (np.bincount(x, minlength=len(names)) / rows for x in (answers, seen.labels))
    most = int((predicted - actual).argmax())
    accuracy = float((answers == seen.labels).mean())
    biased = bool(predicted[most] - actual[most] > BIAS) and not untrained
    favoured = f"'{names[most]}'" if biased else "no label"
    section.add(
        NOTE if biased else OK,
        "zero_shot_balance",
        f"the untrained model favours {favoured}: of {rows:,} dev rows {percent(predicted[most])} are predicted"
        f" '{names[most]}' and {percent(actual[most])} labelled so; {percent(accuracy)} are right",
        "the first steps usually correct this; until then read accuracy together with the predicted shares",
        accuracy=accuracy,
        rows=rows,
        predicted=dict(zip(names, predicted.tolist(), strict=True)),
        actual=dict(zip(names, actual.tolist(), strict=True)),
    )


def separation(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the AUC of the difference of scores for two labels; for more, the mean AUC of each log-probability.

    The AUC is the probability that a row of a label scores above one of another; ties count half. Labels without a row
    are left out. `scores` are [rows, labels], `labels` [rows].
    """
    from scipy.special import log_softmax
    from sklearn.metrics import roc_auc_score

    if scores.shape[1] == 2:
        return float(roc_auc_score(labels == 1, scores[:, 1] - scores[:, 0]))
    log_probabilities = log_softmax(scores, axis=1)
    return float(np.mean([roc_auc_score(labels == label, log_probabilities[:, label]) for label in np.unique(labels)]))


def chance_error(labels: np.ndarray) -> float:
    """Return the standard error of the AUC of scores that say nothing (Mann-Whitney), averaged over the labels."""
    counts = np.unique(labels, return_counts=True)[1]
    return float(np.sqrt((len(labels) + 1) / (12 * counts * (len(labels) - counts))).mean())
