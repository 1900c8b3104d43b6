"""`whet classify`: from files to a trained, evaluated, saved classifier."""

from __future__ import annotations

from whet.config.arguments import TrainingArguments
from whet.jobs.run import run_job
from whet.tasks.classify.arguments import ClassifyArguments
from whet.tasks.classify.rules import check_run
from whet.tasks.classify.splits import read_split

_SHOWN = {
    "train_runtime": ("training", "{:,.1f} s"),
    "train_samples_per_second": ("rows a second", "{:,.2f}"),
    "train_tokens_per_second": ("real tokens a second", "{:,.0f}"),
    "train_padding_avoided": ("padding avoided", "{:.0%}"),
    "train_loss": ("mean training loss", "{:.4f}"),
    "eval_runtime": ("evaluation", "{:,.1f} s"),
    "eval_loss": ("loss", "{:.4f}"),
    "eval_accuracy": ("accuracy", "{:.2%}"),
    "eval_f1_micro": ("F1, micro", "{:.4f}"),
    "eval_f1_macro": ("F1, macro", "{:.4f}"),
    "eval_matthews_correlation": ("Matthews' correlation", "{:.4f}"),
    "eval_pearson": ("Pearson's correlation", "{:.4f}"),
    "eval_spearmanr": ("Spearman's correlation", "{:.4f}"),
    "eval_mse": ("mean squared error", "{:.4f}"),
    "predict_accuracy": ("accuracy, test", "{:.2%}"),
    "predict_pearson": ("Pearson's, test", "{:.4f}"),
}


def run_classify(job: ClassifyArguments, args: TrainingArguments) -> int:
    """Run the command; return its exit code. Whatever is wrong with folder or data is raised before torch is loaded."""
    lines: list[str] = []

    def work() -> dict[str, float]:
        wanted = {"train": args.do_train, "validation": args.do_eval, "test": args.do_predict}
        examples = {name: read_split(job, name) for name, want in wanted.items() if want}

        from whet.tasks.classify.job import prepare, tables

        prepared = prepare(job, args, examples)
        metrics = prepared.run()
        lines.extend(tables(prepared))
        return metrics

    return run_job(job, args, check_run(job, args), work, _SHOWN, lines)
