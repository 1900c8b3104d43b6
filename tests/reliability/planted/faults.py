"""Faults that a change may bring into whet, each with the tests that must fail when it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """A part of a file of the package, and its replacement."""

    file: str
    old: str
    new: str

    def apply(self, package: Path) -> None:
        """Change the file below the package's folder; ValueError unless the old part occurs exactly once."""
        path = package / self.file
        text = path.read_text("utf-8")
        if (n := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} holds {self.old!r} {n} times: update the fault")
        path.write_text(text.replace(self.old, self.new), "utf-8")


@dataclass(frozen=True)
class Planted:
    """One fault: `what` it is for a reader, its edits, and the tests that must all fail."""

    name: str
    what: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


_KEPT_LATER = "write.rotate([*self.earlier, self.staged.target], self.keep, self.protected)\n"

PLANTED = (
    Planted(
        "no-fsync",
        "files and folders are not synced before the rename",
        (Edit("system.py", "    os.fsync(handle)\n", "    pass\n"),),
        ("reliability/test_power_cut.py::test_every_file_is_synced_before_its_folder_gets_its_name",),
    ),
    Planted(
        "rename-first",
        "the folder is renamed before it is sealed",
        (
            Edit("store/write.py", "            manifest.seal(self.folder, self.step, content)\n", ""),
            Edit(
                "store/write.py",
                "            replaces = self._renames.put_in_place(self.folder, self.target, self._replaced)\n",
                "            replaces = self._renames.put_in_place(self.folder, self.target, self._replaced)\n"
                "            manifest.seal(self.target, self.step, content)\n",
            ),
        ),
        ("reliability/test_power_cut.py::test_every_file_is_synced_before_its_folder_gets_its_name",),
    ),
    Planted(
        "manifest-unread",
        "a checkpoint counts as complete if it has a manifest",
        (
            Edit(
                "store/find.py",
                "    return manifest.problems_of(folder, step_of(folder) if NAME.fullmatch(folder.name) else None, "
                "light=light)\n",
                "    return [] if (folder / manifest.MANIFEST).exists() else ['the manifest is missing']\n",
            ),
        ),
        ("reliability/test_damage.py::test_damage_is_found_and_the_checkpoint_before_is_used[flip_a_bit]",),
    ),
    Planted(
        "checksum-of-names",
        "the checksum covers the file's name and not its bytes",
        (
            Edit(
                "store/manifest.py",
                '"xxh3_128": _digest(file)}',
                '"xxh3_128": xxhash.xxh3_128(path.name.encode()).hexdigest()}',
            ),
            Edit(
                "store/manifest.py",
                "None if _digest(file) == facts",
                "None if xxhash.xxh3_128(Path(name).name.encode()).hexdigest() == facts",
            ),
        ),
        ("reliability/test_damage.py::test_damage_is_found_and_the_checkpoint_before_is_used[flip_a_bit]",),
    ),
    Planted(
        "newest-by-mtime",
        "the newest checkpoint is the one with the latest time stamp",
        (
            Edit(
                "store/find.py",
                "for path in found if path.is_dir()), key=step_of)",
                "for path in found if path.is_dir()), key=lambda path: path.stat().st_mtime)",
            ),
        ),
        ("reliability/test_clocks.py::test_the_newest_is_found_and_kept_whatever_the_times_say",),
    ),
    Planted(
        "sampler-off-by-one",
        "a resumed run continues one batch too late",
        (
            Edit("data/order.py", "    drop_last: bool = False\n", "    drop_last: bool = False\n    skips: int = 0\n"),
            Edit(
                "data/order.py",
                "within = divmod(step, self.steps_per_epoch)\n        rows_per_step",
                "within = divmod(step + self.skips, self.steps_per_epoch)\n        rows_per_step",
            ),
            Edit(
                "store/restore.py",
                '    logger.info("resuming after step',
                '    object.__setattr__(run.plan.order, "skips", 1)\n    logger.info("resuming after step',
            ),
        ),
        ("reliability/test_bookkeeping.py::test_a_run_goes_on[at the end of an epoch-stops2-changes2]",),
    ),
    Planted(
        "epoch-not-restored",
        "a resumed run repeats the first epoch's order",
        (
            Edit("data/order.py", "    drop_last: bool = False\n", "    drop_last: bool = False\n    began: int = 0\n"),
            Edit("data/order.py", "self.epochs(epoch)", "self.epochs(epoch - self.began)"),
            Edit(
                "store/restore.py",
                '    logger.info("resuming after step',
                "    order = run.plan.order\n"
                '    object.__setattr__(order, "began", counters.global_step // order.steps_per_epoch)\n'
                '    logger.info("resuming after step',
            ),
        ),
        ("reliability/test_bookkeeping.py::test_a_run_goes_on[at the end of an epoch-stops2-changes2]",),
    ),
    Planted(
        "dropout-from-global-state",
        "dropout's seed is how many batches this process has run",
        (
            Edit(
                "models/packed.py",
                "        seed=seed,\n",
                '        seed=next(position_of.__dict__.setdefault("n", __import__("itertools").count())),\n',
            ),
        ),
        ("reliability/test_bookkeeping.py::test_a_run_goes_on[at the end of an epoch-stops2-changes2]",),
    ),
    Planted(
        "staging-reused",
        "files of a killed save stay in the staging folder",
        (
            Edit(
                "store/write.py",
                "        _remove_leftover(self.folder)\n        finish_replacement(self.target)\n",
                "        finish_replacement(self.target)\n",
            ),
            Edit(
                "store/write.py",
                "        self.folder.mkdir()\n",
                "        self.folder.mkdir(exist_ok=True)\n",
            ),
        ),
        ("security/test_own_folders.py::test_nothing_outside_changes[staging folder is a link]",),
    ),
    Planted(
        "rotation-first",
        "the old checkpoint is removed before the new one is verified",
        (
            Edit("store/save.py", f"            {_KEPT_LATER}", ""),
            Edit(
                "store/save.py",
                "            self.staged.publish(self.facts)\n",
                f"            {_KEPT_LATER}            self.staged.publish(self.facts)\n",
            ),
        ),
        ("reliability/test_power_cut.py::test_every_file_is_synced_before_its_folder_gets_its_name[one kept]",),
    ),
    Planted(
        "no-lock",
        "the output folder is not locked",
        (
            Edit(
                "watch/lock.py",
                "            _lock(handle)\n        except",
                "            pass\n        except",
            ),
        ),
        (
            "reliability/test_lock.py::test_a_killed_holder_frees_it",
            "reliability/test_lock.py::test_two_names_of_one_folder_are_one",
        ),
    ),
    Planted(
        "nan-step-applied",
        "a step with a loss or gradient of NaN changes the weights",
        (
            Edit(
                "engine/step.py",
                "        applied=finite,\n",
                "        applied=True,\n",
            ),
        ),
        ("reliability/test_non_finite_kinds.py::test_a_bad_step_changes_no_bit[nan loss]",),
    ),
    Planted(
        "signal-dropped",
        "a signal during a step is received and forgotten",
        (
            Edit(
                "watch/stop.py",
                "    _current.requested = _current.requested or signal.Signals(number).name\n",
                "    _current.requested = None if _current.deferred else signal.Signals(number).name\n",
            ),
        ),
        ("reliability/test_signals_library.py::test_a_trainer_that_is_told_to_listens",),
    ),
    Planted(
        "link-followed",
        "a link in a checkpoint is followed",
        (
            Edit(
                "store/manifest.py",
                "open_plain(path, os.O_RDONLY)",
                "open_plain(path, os.O_RDONLY, follow=True)",
            ),
        ),
        (
            "reliability/test_damage.py::test_what_is_no_plain_file_is_neither_followed_nor_waited_for[link-model.safetensors]",
        ),
    ),
    Planted(
        "torch-load",
        "a file in the model's folder is read with torch.load",
        (
            Edit(
                "models/loading/load.py",
                "    tensors = check_weights(folder, config.to_dict())\n",
                "    tensors = check_weights(folder, config.to_dict())\n"
                '    if (folder / "training_args.bin").exists():\n'
                '        torch.load(folder / "training_args.bin", weights_only=False)\n',
            ),
        ),
        (
            "security/test_pickle_carriers.py::test_a_whole_run_and_its_resumption_unpickle_nothing",
            "rules/test_safety.py::test_no_code_comes_from_data",
        ),
    ),
    Planted(
        "ranks-unpickle",
        "ranks exchange their values by torch's object collectives",
        (
            Edit(
                "dist/group.py",
                "            return messages.gather(value, valid, n_ranks=self.n_ranks, device=self.device, "
                "large=large)\n",
                "            found: list[Any] = [None] * self.n_ranks\n"
                "            torch_dist.all_gather_object(found, value)\n"
                "            return found\n",
            ),
            Edit(
                "dist/group.py",
                "            return messages.of_first(value, valid, rank=self.rank, device=self.device)\n",
                "            held: list[Any] = [value]\n"
                "            torch_dist.broadcast_object_list(held, src=0)\n"
                "            return held[0]\n",
            ),
        ),
        (
            "ranks/test_rank_messages.py::test_pickle_from_a_rogue_rank_ends_the_others_and_is_not_read[rogue-1]",
            "ranks/test_rank_messages.py::test_pickle_from_a_rogue_rank_ends_the_others_and_is_not_read"
            "[rogue rank 0-0]",
            "rules/test_safety.py::test_no_code_comes_from_data",
        ),
    ),
    Planted(
        "message-unchecked",
        "a message of another rank is taken, whatever value it holds",
        (Edit("dist/messages.py", "    if not valid(value):\n", "    if False:\n"),),
        ("ranks/test_rank_messages.py::test_forged_message_is_refused_with_its_fault[another value]",),
    ),
    Planted(
        "token-logged",
        "the log shows texts unchanged, including secrets",
        (Edit("log.py", "return hide_secrets(escape_controls(", "return (escape_controls("),),
        ("security/test_secrets.py::test_a_traceback_in_the_log_shows_no_secret",),
    ),
    Planted(
        "pass-of-all-threads",
        "all threads that run one model share its running forward pass",
        (
            Edit(
                "kernels/batch_position.py",
                '= ContextVar("whet_running_pass", default=None)\n',
                '= __import__("types").SimpleNamespace()\n'
                "_SHARED = [None]\n"
                "vars(_RUNNING).update(get=lambda: _SHARED[-1], set=_SHARED.append)\n",
            ),
        ),
        ("methods/test_optimize_threads.py::test_two_threads_in_the_midst_of_their_passes_see_their_own_rows",),
    ),
    Planted(
        "rotation-before-restore",
        "a resumed run removes checkpoints before it knows which is the best",
        (
            Edit(
                "store/save.py",
                'self._own(saved["names"]) if self.sync.place.is_first else [])\n\n',
                'self._own(saved["names"]) if self.sync.place.is_first else [])\n        self.rotate()\n\n',
            ),
        ),
        ("train/test_best_model.py::test_resumed_run_keeps_its_best_checkpoint[1]",),
    ),
    Planted(
        "best-by-path",
        "the best checkpoint is the path in the saved state, even if the folder was moved",
        (
            Edit("store/snapshot.py", "Path(best).name if best else None}", "best}"),
            Edit(
                "store/best.py",
                "find.by_name(name, lineage, output_dir)",
                "Path(saved) if saved else None",
            ),
            Edit(
                "store/best.py",
                "if find.by_name(folder.name, lineage, folder.parent) is None:",
                "if False:",
            ),
        ),
        (
            "reliability/test_lines.py::test_moved_run_ends_with_its_own_best",
            "reliability/test_lines.py::test_no_file_of_a_run_names_a_place",
        ),
    ),
    Planted(
        "foreign-checkpoint",
        "a checkpoint of any run counts as one of this run",
        (
            Edit(
                "store/find.py",
                "return run == self.run or any(run == parent and step <= last for parent, last in self.parents)",
                "return True",
            ),
        ),
        ("reliability/test_lines.py::test_foreign_checkpoint_in_the_place_of_the_best_is_refused",),
    ),
    Planted(
        "old-line-taken",
        "a run that resumes from an older checkpoint leaves the abandoned checkpoints where auto uses them",
        (
            Edit("store/write.py", "aside = self._set_others_aside()", "aside = []"),
            Edit(
                "store/find.py",
                "any(other.lineage.rewound_past(one.lineage.run, one.step) for other in found)",
                "False",
            ),
        ),
        (
            "reliability/test_lines.py::test_command_after_going_back_resumes_the_new_line",
            "reliability/test_lines.py::test_going_back_names_the_parent_and_keeps_what_it_leaves",
        ),
    ),
    Planted(
        "modules-bypassed",
        "attention reads the weights of its projections and bypasses adapters",
        (
            Edit(
                "models/fused/attention.py",
                "        if why_called(part, nn.Linear) is not None or part.bias is None",
                "        if part.bias is None",
            ),
        ),
        (
            "parity/test_peft.py::test_lora_has_the_losses_of_transformers_trainer[bert-engine]",
            "models/test_called_modules.py::test_what_is_put_on_a_module_counts"
            "[native-bert-attention.self.query-forward hook-after]",
        ),
    ),
    Planted(
        "copied-blocks-unseparated",
        "a block that is copied within a model, or comes from another, sees the tokens of all rows",
        (
            Edit(
                "kernels/batch_position.py",
                "    def __deepcopy__(self, memo: object) -> Placement:\n        return self\n\n",
                "",
            ),
            Edit(
                "models/fused/limits.py", "if position is not None and position.is_of(n_rows, n_tokens):", "if False:"
            ),
        ),
        (
            "methods/test_changed_blocks.py::test_changed_blocks_answer_as_without_whet[bert-a copy appended]",
            "methods/test_changed_blocks.py::test_a_block_of_another_model_is_refused[another model of whet's-bert]",
        ),
    ),
    Planted(
        "last-block-twice",
        "a last block that also runs earlier leaves tokens out there",
        (
            Edit(
                "models/last_block.py",
                "return found[0] if _count_in(encoder, found[0]) == 1 else None",
                "return found[0]",
            ),
        ),
        ("methods/test_changed_blocks.py::test_changed_blocks_answer_as_without_whet[bert-shared before]",),
    ),
    Planted(
        "random-weights",
        "weights that are not in the files of a model are random, whichever they are",
        (
            Edit(
                "models/loading/missing_check.py",
                "lost = sorted(name for name in missing if not is_part(name, parts) or name in half)",
                "lost: list[str] = []",
            ),
        ),
        (
            "models/test_loaded_weights.py::test_weights_that_are_not_in_the_files_are_refused[one q_proj]",
            "models/test_loaded_weights.py::test_every_command_refuses_a_model_without_a_projection",
        ),
    ),
    Planted(
        "sequences-joined",
        "sequences whose positions restart in a row of the caller's batch see each other",
        (
            Edit(
                "methods/unpad/method.py",
                "by_position = causal and mask is None and not calls.keeps_cache(self, call)",
                "by_position = False",
            ),
            Edit(
                "objectives/unpadding.py",
                'by_position=causal and inputs.get("attention_mask") is None',
                "by_position=False",
            ),
        ),
        (
            "methods/test_packed_calls.py::test_packed_input_in_any_form_gives_what_transformers_gives"
            "[mistral-offset positions]",
            "leak/test_decoder_leaks.py::test_a_changed_row_moves_no_other_that_a_caller_lays_next_to_it"
            "[llama-positions-bf16]",
            "train/test_trainer_like_transformers.py::test_sequences_end_to_end_train_as_in_transformers[positions]",
        ),
    ),
    Planted(
        "offsets-unread",
        "sequences that cu_seq_lens names see each other",
        (Edit("data/sequences.py", "begins.view(-1)[offsets[offsets < ids.numel()].long()] = True", "pass"),),
        (
            "methods/test_packed_calls.py::test_named_sequences_are_kept_apart_in_every_attention"
            "[modernbert-positions-cu_seq_lens]",
            "leak/test_row_leaks.py::test_a_changed_row_moves_no_other_that_a_caller_names[bert-cu_seq_lens-bf16]",
        ),
    ),
    Planted(
        "overlaps-unseen",
        "nobody knows which parameters share memory",
        (Edit("kernels/shared_memory.py", "    if _are_apart(tensors):\n        return []\n", "    return []\n"),),
        tuple(
            f"optim/test_shared_memory.py::test_{name}"
            for name in (
                "update_of_overlapping_parameters_equals_theirs_one_by_one[native-WhetAdamW-transposed]",
                "update_of_overlapping_parameters_equals_theirs_one_by_one[native-WhetAdamW8bit-columns]",
                "trainer_with_overlapping_parameters_trains_as_torch_does[adapter-{}]",
                "trainer_with_overlapping_parameters_trains_as_torch_does[matrix-"
                "{'max_grad_norm': 0.0, 'optimizer_in_backward': True}]",
                "saved_model_has_every_overlapping_weight_by_name",
                "weights_raised_to_float32_share_memory_as_before",
            )
        ),
    ),
)
