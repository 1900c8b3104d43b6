"""`whet tag`: from files to a trained, evaluated, saved tagger."""

from __future__ import annotations

from whet.config.arguments import TrainingArguments
from whet.jobs.run import run_job
from whet.tasks.tag.arguments import TagArguments
from whet.tasks.tag.rules import check_run
from whet.tasks.tag.splits import read_split

_SHOWN = {
    "train_runtime": ("training", "{:,.1f} s"),
    "train_samples_per_second": ("sentences a second", "{:,.2f}"),
    "train_tokens_per_second": ("real tokens a second", "{:,.0f}"),
    "train_padding_avoided": ("padding avoided", "{:.0%}"),
    "train_loss": ("mean training loss", "{:.4f}"),
    "eval_runtime": ("evaluation", "{:,.1f} s"),
    "eval_loss": ("loss", "{:.4f}"),
    "eval_accuracy": ("accuracy of words", "{:.2%}"),
    "eval_precision": ("precision of entities", "{:.4f}"),
    "eval_recall": ("recall of entities", "{:.4f}"),
    "eval_f1": ("F1 of entities", "{:.4f}"),
    "eval_f1_macro": ("F1 of tags, macro", "{:.4f}"),
    "predict_accuracy": ("accuracy, test", "{:.2%}"),
    "predict_f1": ("F1 of entities, test", "{:.4f}"),
}


def run_tag(job: TagArguments, args: TrainingArguments) -> int:
    """Run the command; return its exit code. Whatever is wrong with folder or data is raised before torch is loaded."""

    def work() -> dict[str, float]:
        wanted = {"train": args.do_train, "validation": args.do_eval, "test": args.do_predict}
        sentences = {name: read_split(job, name) for name, want in wanted.items() if want}

        from whet.tasks.tag.job import prepare

        return prepare(job, args, sentences).run()

    return run_job(job, args, check_run(job, args), work, _SHOWN)
