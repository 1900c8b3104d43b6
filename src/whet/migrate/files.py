"""What stands in files: DeepSpeed's and accelerate's configurations, manifests, options, and Python scripts."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from whet.config import deepspeed, secrets
from whet.config.arguments import TrainingArguments
from whet.config.command_line import LARGEST_BYTES, read_config
from whet.config.settings import Names
from whet.config.settings import draft as draft_settings
from whet.errors import ConfigError
from whet.kubernetes.arguments import RESERVED
from whet.migrate import accelerate, launchers, variables
from whet.migrate.answer import OwnCommands
from whet.migrate.draft import Draft, Ranks, option_text, shown
from whet.migrate.programs import Flag, Program, flags_of, own_program, program_of, translate, why_not
from whet.migrate.shell import Word, read


@dataclass(frozen=True)
class Pods:
    """The pods of a job on Kubernetes."""

    kind: str
    """That of `whet k8s`."""
    n_pods: int
    spec: Mapping[str, Any]
    elastic: Mapping[str, Any]


_OF_DEEPSPEED = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
_ARGUMENTS = {"TrainingArguments": None, "Seq2SeqTrainingArguments": None, "SFTConfig": "sft", "DPOConfig": "dpo"}
"""Classes of arguments -> the command of TRL that has the same, if there is one."""
_HEADS = {
    "QuestionAnswering": "qa", "SequenceClassification": "classify", "TokenClassification": "tag", "CausalLM": "lm",
}  # fmt: skip
_WORK = {"train": "do_train", "evaluate": "do_eval", "predict": "do_predict"}
_SPLITS = {"train": "train_file", "validation": "validation_file", "test": "test_file"}


def options_of(values: Mapping[str, Any]) -> dict[str, Flag]:
    """Return the options that names and values of a file are."""
    return {name: Flag(name, f"{name}: {_text(value)}", _words(value)) for name, value in values.items()}


def _words(value: Any) -> list[Word]:
    if isinstance(value, (list, tuple)):
        return [Word.of(_text(one)) for one in value]
    return [Word.of(_text(value))]


def _text(value: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def of_file(path: Path, task: str | None, own: OwnCommands) -> Draft:
    """Return the run, or the part of one, that a file other than a shell script describes."""
    draft = Draft(partial=path.suffix != ".py")
    if (job := _job_in(path)) is not None:
        return _of_job(job, task, own)
    program, flags = _read(draft, path, task)
    if program is not None:
        translate(draft, program, flags, own.options(program.task))
    else:
        names = Names.of((TrainingArguments,), say="--{}".format)
        translate(draft, Program(name=path.name, task=""), flags, names)
        draft.task = task
    return draft


def _read(draft: Draft, path: Path, task: str | None) -> tuple[Program | None, dict[str, Flag]]:
    """Read a file; return its program, and options that are still to be translated."""
    if path.suffix == ".py":
        return _from_python(draft, path, task)
    found = read_config(str(path))
    if accelerate.is_config(found):
        accelerate.translate_config(draft, found)
    elif _OF_DEEPSPEED & found.keys():
        _from_deepspeed(draft, path, found)
    else:
        return (own_program(task, path.name) if task else None), options_of(found)
    return None, {}


def _from_deepspeed(draft: Draft, path: Path, found: Mapping[str, Any]) -> None:
    """Name the file in --deepspeed; if whet refuses a key of it, write its values as options instead."""
    draft.ranks.launched = True
    given = {"deepspeed": str(path)}
    settings = draft_settings(TrainingArguments, given)
    problem = deepspeed.config_is_honoured(settings)
    wrong = dict(_by_key(str(problem.got))) if problem is not None else {}
    values, tuned = deepspeed.values_for(given), deepspeed.tunes_engine(str(path))
    stage = deepspeed.stage_of(str(path))
    if problem is None:
        draft.put("deepspeed", path)
        draft.say(str(path), "kept", f"without DeepSpeed's engine, whet's own stage {stage} does the same")
    else:
        draft.say(str(path), "translated", "whet refuses keys of the file: these options say what it can honour",
                  " ".join(_put_values(draft, values, stage)))  # fmt: skip
    for key, value in _leaves(found):
        text = f"{key}: {_text(value)}"
        fault = next((said for name, said in wrong.items() if f"{key}.".startswith(f"{name}.")), None)
        if fault is not None:
            draft.say(text, "refused", f"{fault.rpartition(', and ')[2]}: remove the key, or use the options above")
        elif value == deepspeed.AUTO:
            draft.say(text, "done", "it takes the value of whet's option")
        elif key in tuned and not deepspeed.runs(str(path)):
            draft.say(text, "no effect", "it tunes DeepSpeed's engine, which is not installed")
        else:
            draft.say(text, "kept" if problem is None else "translated", "")


def _put_values(draft: Draft, values: Mapping[str, Any], stage: int) -> Iterator[str]:
    if stage:
        yield draft.put("zero_stage", stage)
    for name, value in values.items():
        yield draft.put(name, _text(value))


def _by_key(got: str) -> Iterator[tuple[str, str]]:
    for text in got.split("; "):
        yield text.partition(" is ")[0], text


def _leaves(part: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


class _Script(ast.NodeVisitor):
    """Collects what a training script says in literals, and in names that are set once to literals."""

    def __init__(self, tree: ast.Module) -> None:
        self.constants: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}
        """Option -> the expression that the script computes it by."""
        self.task: str | None = None
        self.command: str | None = None
        """Of TRL: sft or dpo."""
        self.found = False
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                known, value = self._value(node.value)
                if known:
                    self.constants[node.targets[0].id] = value
        self.visit(tree)

    def _value(self, node: ast.expr) -> tuple[bool, Any]:
        if isinstance(node, ast.Name) and node.id in self.constants:
            return True, self.constants[node.id]
        try:
            return True, ast.literal_eval(node)
        except ValueError:
            return False, None

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = getattr(node.func.value, "id", "") if isinstance(node.func, ast.Attribute) else ""
        if name in _ARGUMENTS:
            self._arguments(name, node)
        elif name == "from_pretrained" and (head := owner.rpartition("For")[2]) in _HEADS:
            self.task = _HEADS[head]
            self._put("model_name_or_path", node.args[:1])
        elif name == "load_dataset":
            self._data(node)
        elif name in _WORK and isinstance(node.func, ast.Attribute) and "train" in owner.lower():
            self.values[_WORK[name]] = True
        elif name in ("SFTTrainer", "DPOTrainer"):
            self.task, self.command = "lm", name[:3].lower()
            self._put("model_name_or_path", [one.value for one in node.keywords if one.arg == "model"])
        self.generic_visit(node)

    def _put(self, option: str, nodes: list[ast.expr]) -> None:
        known, value = self._value(nodes[0]) if nodes else (False, None)
        if known and isinstance(value, str):
            self.values[option] = value

    def _arguments(self, name: str, node: ast.Call) -> None:
        self.found = True
        self.command = _ARGUMENTS[name] or self.command
        given = [*zip(("output_dir",), node.args, strict=False)]
        given += [(one.arg or "", one.value) for one in node.keywords]
        for option, expression in given:
            known, value = self._value(expression)
            if known and not option and isinstance(value, dict):
                self.values |= value
            elif known and option:
                self.values[option] = value
            else:
                self.unknown[option or "**"] = ast.unparse(expression)

    def _data(self, node: ast.Call) -> None:
        files = next((self._value(one.value)[1] for one in node.keywords if one.arg == "data_files"), None)
        if isinstance(files, dict):
            self.values |= {_SPLITS[split]: file for split, file in files.items() if split in _SPLITS}
        elif isinstance(files, str):
            self.values["train_file"] = files
        else:
            self._put("dataset_name", node.args[:1])
            self._put("dataset_config_name", node.args[1:2])


def _from_python(draft: Draft, path: Path, task: str | None) -> tuple[Program | None, dict[str, Flag]]:
    """Read the arguments of a training script, without running it."""
    try:
        tree = ast.parse(path.read_text("utf-8-sig"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(
            what="the script cannot be read", got=f"{path}: {error}", why="its arguments are read from its source",
            fix="name a Python file that python -m py_compile accepts",
        ) from None  # fmt: skip
    script = _Script(tree)
    if not script.found:
        raise ConfigError(
            what="the script makes no arguments of a training",
            got=str(path),
            why=f"whet reads calls of {', '.join(_ARGUMENTS)}",
            fix="give the command line that starts it: whet migrate 'python ...'",
        )
    if script.command:
        program, _ = program_of(f".trl.scripts.{script.command}", [])
    else:
        task = task or script.task
        program = own_program(task, path.name) if task else None
    for option, expression in script.unknown.items():
        draft.say(f"{option}={expression}", "refused", "the script computes it: give its value to the command of whet")
    why = (
        "its loop, collator and metrics are whet's own in a command; or keep it, and change the import to whet.Trainer"
    )
    draft.say(str(path), "done", why)
    return program, options_of(script.values)


_IMAGE = "registry.example.org/whet:1"
_OUTPUT = "/output"
"""Where `whet k8s` mounts the claim for the output."""


def _job_in(path: Path) -> dict[str, Any] | None:
    """Return the job of a manifest of Kubernetes, if the file is one; it may hold other objects too."""
    if path.suffix not in (".yaml", ".yml") or path.stat().st_size > LARGEST_BYTES:
        return None
    try:
        found = list(yaml.safe_load_all(path.read_text("utf-8-sig")))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    objects = [one for one in found if isinstance(one, dict) and {"apiVersion", "kind"} <= one.keys()]
    job = next((one for one in objects if one["kind"] in _PODS), None)
    if objects and job is None:
        raise ConfigError(
            what="no object of the manifest is a job that whet reads",
            got=", ".join(str(one["kind"]) for one in objects),
            why=f"whet reads the pods of {', '.join(_PODS)}",
            fix="give the command line of its containers: whet migrate 'torchrun ...'; whet k8s writes the manifest",
        )
    return job


def _of_pytorch_job(job: Mapping[str, Any]) -> Pods:
    replicas = job["spec"]["pytorchReplicaSpecs"]
    first = replicas.get("Worker") or next(iter(replicas.values()))
    n_pods = sum(int(one.get("replicas", 1)) for one in replicas.values())
    return Pods("pytorchjob", n_pods, first["template"]["spec"], job["spec"].get("elasticPolicy") or {})


def _of_plain_job(job: Mapping[str, Any]) -> Pods:
    return Pods("job", int(job["spec"].get("completions") or 1), job["spec"]["template"]["spec"], {})


_PODS = {"PyTorchJob": _of_pytorch_job, "Job": _of_plain_job}
"""Kind of an object -> what reads its pods."""


def _of_job(job: Mapping[str, Any], task: str | None, own: OwnCommands) -> Draft:
    """Return the run of a job on Kubernetes, as a command of `whet k8s`."""
    draft = Draft(cluster_name=str((job.get("metadata") or {}).get("name") or "train"))
    try:
        pods = _PODS[job["kind"]](job)
        container = pods.spec["containers"][0]
        script, words = _words_of(draft, container)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            what=f"the {job['kind']} has no pods that whet can read",
            got=f"{type(error).__name__}: {error}",
            why="a template names containers, and the command of the first one trains",
            fix="check the manifest with kubectl, or give the command line of its container to whet migrate",
        ) from None
    program, rest = program_of(script, words)
    if program is None and task is not None:
        program = own_program(task, script)
    if program is None:
        raise ConfigError(
            what="no script in the manifest is one that whet knows", got=script,
            why="the command of the first container trains", fix=why_not(script),
        )  # fmt: skip
    translate(draft, program, flags_of(rest)[0], own.options(program.task))
    _describe(draft, job, pods, container)
    return draft


def _words_of(draft: Draft, container: Mapping[str, Any]) -> tuple[str, list[Word]]:
    """Return the script of a container and its words; those of a shell's text are the last command's that trains."""
    given = [str(word) for word in (*(container.get("command") or ()), *(container.get("args") or ()))]
    lines = [[Word.of(word) for word in given]]
    if given[0].rsplit("/", 1)[-1] in ("bash", "sh"):
        lines = [one.words for one in read(given[-1]).commands if one.words]
    tried = [(trial := Draft(), launchers.peeled(trial, words)) for words in lines]
    known = [one for one in tried if program_of(*one[1])[0] is not None]
    trial, (script, rest) = (known or tried)[-1]
    draft.ranks, draft.given_variables = trial.ranks, trial.given_variables
    draft.rows += [row for row in trial.rows if not (row.status == "kept" and row.given.startswith("torchrun"))]
    for other, (name, _) in tried:
        if other is not trial:
            draft.say(name.rsplit("/", 1)[-1] or "another command", "done", "whet's image has what a run needs")
    return script, rest


def _describe(draft: Draft, job: Mapping[str, Any], pods: Pods, container: Mapping[str, Any]) -> None:
    """Write what the manifest says about its pods into the options of `whet k8s`."""

    def put(given: str, option: str, value: object, why: str = "") -> None:
        draft.cluster.setdefault(option, []).append(Word.of(value))
        draft.say(given, "translated", why, f"whet k8s --{option} {value}")

    meta, spec = job.get("metadata") or {}, pods.spec
    put(f"kind: {job['kind']}", "kind", pods.kind)
    put(f"image: {container.get('image')}", "image", _IMAGE, "an image with whet in it: docs/kubernetes.md builds one")
    put(f"replicas: {pods.n_pods}", "nodes", pods.n_pods)
    per_pod = draft.ranks.per_host or draft.ranks.total
    if per_pod is not None:
        put(f"{per_pod.text} ranks in a pod", "nproc_per_node", per_pod.text)
    draft.ranks = Ranks()
    for part, options in ((meta, _OF_META), (pods.elastic, _ELASTIC), (spec, _OF_POD), (container, _OF_CONTAINER)):
        for name, option in options.items():
            if name in part and option:
                put(f"{name}: {part[name]}", option, part[name])
    for name in ("labels", "annotations"):
        for key, value in (meta.get(name) or {}).items():
            put(f"{name} {key}: {value}", name[:-1], f"{key}={value}")
    for key, value in (spec.get("nodeSelector") or {}).items():
        put(f"nodeSelector {key}: {value}", "node_selector", f"{key}={value}")
    resources = container.get("resources") or {}
    for name, value in {**(resources.get("requests") or {}), **(resources.get("limits") or {})}.items():
        if option := {"cpu": "cpus", "memory": "memory", "ephemeral-storage": "ephemeral_storage"}.get(name):
            put(f"{name}: {value}", option, value, "requested, and the limit as well")
        else:
            draft.say(f"{name}: {value}", "refused", "whet k8s asks for CPUs and memory: leave it out")
    moved = _mount(draft, spec, container, put)
    set_in_line = [{"name": name, "value": word.text} for name, word in draft.given_variables.items()]
    draft.given_variables = {}
    for one in (*(container.get("env") or ()), *set_in_line):
        _pass_on(draft, one, moved, put)
    for name, words in draft.options.items():
        draft.options[name] = [_moved(word, moved) for word in words]
        if draft.options[name] != words:
            draft.correct(name, "translated", option_text(name, draft.options[name]))
    draft.say("restartPolicy", "done", "whet k8s restarts what failed, --max_restarts times")
    for part, known in ((spec, {*_OF_POD, *_READ_OF_POD}), (container, {*_OF_CONTAINER, *_READ_OF_CONTAINER})):
        for name in part.keys() - known:
            draft.say(name, "refused", "whet k8s --help all has the options of pods; or add it to what it renders")


_OF_META = {"namespace": "namespace"}
_OF_POD = {"serviceAccountName": "service_account", "terminationGracePeriodSeconds": "grace_period_s"}
_READ_OF_POD = {"containers", "volumes", "nodeSelector", "restartPolicy"}
_OF_CONTAINER = {"imagePullPolicy": "image_pull_policy"}
_READ_OF_CONTAINER = {"name", "image", "command", "args", "env", "resources", "volumeMounts", "workingDir"}
_ELASTIC = {"minReplicas": "min_nodes", "maxReplicas": "max_nodes", "maxRestarts": "max_restarts",
            "rdzvBackend": "rdzv_backend"}  # fmt: skip
Put = Callable[..., None]


def _mount(draft: Draft, spec: Mapping[str, Any], container: Mapping[str, Any], put: Put) -> dict[str, str]:
    """Name the claim for the output; return the folders that have another name now."""
    moved: dict[str, str] = {}
    volumes = {one.get("name"): one for one in spec.get("volumes") or ()}
    for mount in container.get("volumeMounts") or ():
        volume, path = volumes.get(mount.get("name")) or {}, str(mount.get("mountPath"))
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        if path == "/dev/shm":  # noqa: S108
            size = (volume.get("emptyDir") or {}).get("sizeLimit")
            if size:
                put(f"{path}: {size}", "shared_memory", size)
            else:
                draft.say(path, "done", "--shared_memory is its size, 1Gi")
        elif claim and not moved:
            put(f"{path}: {claim}", "output_claim", claim, f"{path} is {_OUTPUT} in the pods")
            moved[path.rstrip("/")] = _OUTPUT
        else:
            draft.say(
                f"mount {path}", "refused", "whet k8s mounts claims: --data_claim at /data, --cache_claim at /cache"
            )
    return moved


def _pass_on(draft: Draft, one: Mapping[str, Any], moved: Mapping[str, str], put: Put) -> None:
    """Pass a variable of the container on, unless the plan or the image decides it."""
    name, value = str(one.get("name")), str(one.get("value", ""))
    given = shown(f"{name}={value}", secret=bool(secrets.in_variables([f"{name}={value}"])))
    key = ((one.get("valueFrom") or {}).get("secretKeyRef") or {}) if "valueFrom" in one else {}
    fact = variables.fact_of(name)
    if key:
        put(f"{name} of a Secret", "env_from_secret", f"{name}={key.get('name')}/{key.get('key')}")
    elif name == "LD_PRELOAD":
        draft.say(given, "done", "whet's image preloads tcmalloc")
    elif name in RESERVED:
        draft.say(given, "done", RESERVED[name])
    elif name == "CCL_WORKER_COUNT":
        put(given, "kept_free_cores", value, "threads of each rank that are left for the exchange")
    elif fact.status != "kept":
        draft.say(given, fact.status, fact.why)
    elif secrets.in_variables([f"{name}={value}"]):
        draft.say(given, "refused", f"put it into a Secret: --env_from_secret {name}=SECRET")
    else:
        name = variables.MOVED.get(name, name)
        put(given, "env", f"{name}={_moved(Word.of(value), moved).text}")


def _moved(word: Word, moved: Mapping[str, str]) -> Word:
    first = word.parts[0] if word.parts else ""
    for before, after in moved.items():
        if isinstance(first, str) and f"{first}/".startswith(f"{before}/"):
            return Word((after + first[len(before) :], *word.parts[1:]), word.quoted)
    return word
