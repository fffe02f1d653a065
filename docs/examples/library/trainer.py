import json
from importlib.resources import files

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments, set_seed

from mezo_cli import MezoTrainer

demo = files("mezo_cli") / "demo"
tokenizer = AutoTokenizer.from_pretrained(str(demo / "model"))


def make_model():
    set_seed(0)  # of the new head and the LoRA
    model = AutoModelForSequenceClassification.from_pretrained(str(demo / "model"), num_labels=2)
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"]))


def rows(split):
    for line in (demo / "data" / f"{split}.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield {**tokenizer(row["sentence"]), "labels": int(row["label"] == "positive")}


args = TrainingArguments(
    "trained",
    max_steps=12,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    warmup_steps=2,
    eval_strategy="steps",
    eval_steps=6,
    save_steps=6,
    logging_steps=3,
    report_to=[],
    use_cpu=True,
)


def make_trainer():
    return MezoTrainer(
        make_model(),
        args,
        train_dataset=list(rows("train")),
        eval_dataset=list(rows("dev"))[:64],
        processing_class=tokenizer,
        mezo={"eps": 1e-2, "samples": 2, "momentum": 0.9},
    )


trainer = make_trainer()
trainer.train()
print(trainer.optimizer)
print("losses:", *(round(line["loss"], 3) for line in trainer.state.log_history if "loss" in line))

resumed = make_trainer()
resumed.train(resume_from_checkpoint="trained/checkpoint-6")
assert all(p.equal(q) for p, q in zip(resumed.model.parameters(), trainer.model.parameters()))
