"""The night that all stages share: an opened, resumable run, and the earlier run and pools that it builds on."""

import copy
import datetime
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from laserbatch.jobs.console import say
from laserbatch.jobs.settings import NOT_OF_OUTPUT, Settings
from laserbatch.jobs.stages.attempt import build_on, new_manifest, newest_attempt
from laserbatch.jobs.stages.inputs import NEEDS_A_MODEL, checked_inputs, needs_a_model, writable_folder
from laserbatch.pipeline.decoding.model.folder import load_tokenizer, tokenizer_folder
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.knowledge.histories import labels_of
from laserbatch.pipeline.knowledge.prompts import RenderedPrompt, Shown, render_shown
from laserbatch.pipeline.knowledge.templates import PromptTemplate
from laserbatch.pipeline.planning.planner import side_routes
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.figures import PoolFigures, PoolsUsed, PromptRef
from laserbatch.pipeline.storage.forgetting import unfinished_receipts
from laserbatch.pipeline.storage.manifest import RunManifest, settings_hash
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.read import Tables, read_tables
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.index.store import PoolStore, PoolVersion
from laserbatch.retrieval_pools.routing.router import Router, Routes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Night:
    settings: Settings
    workspace: Workspace
    date: datetime.date  # the night sees what was known at the end of this day
    run: RunFolder
    manifest: RunManifest
    changed_inputs: tuple[str, ...] = ()  # names of the inputs that changed since the run was made
    templates: Mapping[Side, PromptTemplate] | None = None  # None: the templates of the settings

    @property
    def previous(self) -> RunFolder | None:
        """The earlier run whose texts are carried over and drafted from; see `earlier_runs`."""
        run_id = self.manifest.origin.previous_run_id
        return None if run_id is None else self.workspace.run(run_id)

    @cached_property
    def tables(self) -> Tables:
        """The input tables as they were known at the end of the night's date."""
        tables, scratch = self.settings.tables, writable_folder(self.workspace.root)
        return read_tables(tables.required_path, self.date, scratch, tables.keep_duplicates)

    @cached_property
    def pools(self) -> PoolStore:
        return PoolStore(self.workspace.pools_folder)

    def template(self, side: Side) -> PromptTemplate:
        """The prompt template of a side, in words that fit its tables."""
        return (self.templates or self._templates)[side]

    @cached_property
    def _templates(self) -> dict[Side, PromptTemplate]:
        labels = labels_of(self.tables.interactions, self.settings.knowledge.words.events)
        return {side: self.settings.template(side, labels) for side in SIDES}

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer of the model that writes the night's texts; it takes seconds to load."""
        return load_tokenizer(self.settings.model_dir, self.settings.decoding.adapter)

    @cached_property
    def tokenizer_hash(self) -> str:
        """The hash of the tokenizer's files, which pools record."""
        return tokenizer_hash(tokenizer_folder(self.settings.model_dir, self.settings.decoding.adapter))

    def render(self, side: Side, shown: Shown) -> RenderedPrompt:
        """The prompt of an entity, as workers render it. Raises RowError if the entity has no prompt."""
        most = self.settings.knowledge.max_prompt_tokens
        return render_shown(self.template(side), shown, self.tokenizer, most, self.date)

    def routes(self, side: Side) -> Routes:
        """The pool group that each entity drafts from; none before the first pools are built."""
        version = self.manifest.generation.pools.version
        router = None if version is None else Router.load(self.pools.folder(version) / "router" / side)
        return side_routes(router, self.tables, side)


def parse_date(text: str) -> datetime.date:
    with suppress(ValueError):
        if 1970 <= (date := datetime.date.fromisoformat(text)).year < 2200:
            return date
    raise ConfigError(f"{text!r} is not a date; expected YYYY-MM-DD between 1970 and 2199, for example 2025-03-01")


def parse_night(text: str, force: bool = False) -> datetime.date:
    """The date of a run that may be published, from the command line.

    Once a run of a future date is published, nights of earlier dates are not published any more. So ConfigError is
    raised for a date after tomorrow, unless `force` is set. Tomorrow is valid, since it may have begun elsewhere.
    """
    date, today = parse_date(text), datetime.date.today()
    if not force and date > today + datetime.timedelta(days=1):
        raise ConfigError(
            f"the date {date} is after tomorrow (today is {today} by this machine's clock): once it is published, runs "
            "of earlier dates are not published any more. Correct the date, or accept it with --force"
        )
    return date


def open_night(
    settings: Settings, date: datetime.date, force: bool = False, redo: bool = False, base_run: RunFolder | None = None
) -> Night:
    """Open the newest run of a date and these settings, finished or not; create one if there is none.

    The workspace's lock must be held. The inputs are checked before anything is written. Files of a finished run never
    change: doing its night again creates another edition, which is a separate run.

    Raises the errors of `checked_inputs`, and WorkspaceError if the unfinished run was started from other inputs.

    Parameters
    ----------
    force : generate unchanged entities too, in another edition if the date has a run already.
    redo : do a finished night again, in another edition, if its inputs have changed since.
    base_run : the finished run that a new run builds on and whose pools it drafts from; None: see `earlier_runs`.
    """
    inputs, tables = checked_inputs(settings, date)
    if needs_a_model(settings):
        say(NEEDS_A_MODEL)
    workspace = Workspace.open(settings.workspace)
    for receipt in unfinished_receipts(workspace.root):
        say(f"a `laserbatch forget` was interrupted: give the command of the receipt {receipt} again")
    attempt = newest_attempt(workspace, date, settings.identity(), inputs, force, redo)
    if attempt.manifest is None:
        night = new_night(settings, workspace, date, attempt.edition, base_run)
        warn_of_shared_words(night)
        say_other_prompts(night)
        night.manifest.origin.force, night.manifest.origin.inputs = force, inputs
        night.manifest.save()
    else:
        night = Night(settings, workspace, date, attempt.run, attempt.manifest, attempt.changed)
        if not attempt.is_done:
            say(f"continuing run {night.run.run_id}")
            leave_lost_pools(night)
            night.manifest.status = "running"
    night.tables = tables
    return night


def leave_lost_pools(night: Night) -> None:
    """Let a resumed run draft from no pools if its own are gone, damaged or of a run that was rolled back."""
    pools = night.manifest.generation.pools.version
    if pools in night.workspace.publication.not_built_on():
        say(f"not drafting from the pools {pools}, because their run was rolled back")
    elif pools is None or can_be_used(night.pools, pools, night.tokenizer_hash):
        return
    night.manifest.generation.pools = PoolsUsed()


def new_night(
    settings: Settings, workspace: Workspace, date: datetime.date, edition: int = 1, base_run: RunFolder | None = None
) -> Night:
    """A night that has not begun, with the run and the pools that it would build on; nothing is written.

    `open_night` describes `base_run`.
    """
    named, output = settings.identity(), settings.of_output()
    manifest = new_manifest(workspace, date, output, named, edition)
    run = workspace.run(manifest.run_id)
    previous = base_run or next(reversed(earlier_runs(workspace, run.run_id)), None)
    build_on(manifest, previous)
    for side in SIDES:
        template = settings.knowledge.template(side)
        manifest.origin.prompts[side] = PromptRef(template.framework, template.identity)
    night = Night(settings, workspace, date, run, manifest)
    published, chosen = workspace.publication.run_id(), base_run
    if published is not None and workspace.run(published).settings_hash != run.settings_hash:
        with suppress(PoolError):  # which `current_pools` prints
            chosen = previous if night.pools.current_version() == published else base_run
    held = {run.run_id for run in workspace.runs() if run.is_held}
    not_used = held | workspace.publication.not_built_on()
    others = {run.run_id for run in workspace.runs() if run.is_finished} - not_used
    first, min_support = None if chosen is None else chosen.run_id, settings.pools.min_support
    pools = current_pools(night.pools, min_support, date, first, not_used, others, night.tokenizer_hash)
    manifest.generation.pools = describe_pools(pools)
    return night


def say_other_prompts(night: Night) -> None:
    """Print a line for each side whose prompts follow another template than in the run before."""
    before = None if night.previous is None else unless_damaged(night.previous.load_manifest)
    if before is None:
        return
    for side, prompt in night.manifest.origin.prompts.items():
        earlier = before.origin.prompts.get(side, prompt).template
        if earlier != prompt.template:
            say(f"{side} prompts use the template {prompt.template}; those of {before.run_id} used {earlier}")


def warn_of_shared_words(night: Night) -> None:
    """Warn if words of one user can get into another user's text, tonight or from the pools that tonight builds."""
    decoding = night.settings.decoding
    is_relaxed = decoding.is_relaxed and decoding.max_draft_tokens != 0
    if "pool" in decoding.drafters and is_relaxed and night.settings.pools.min_support == 1:
        begin = "from the next night on, " * (night.manifest.generation.pools.version is None)
        say(
            f"{begin}users' texts are drafted from other users' texts and verified by the rule {decoding.verifier}, so "
            "words of one user can end up in another user's text. pools.min_support: 5 drafts only what five entities' "
            "texts share; decoding.verifier: greedy accepts only what the model writes anyway"
        )


def earlier_runs(workspace: Workspace, run_id: str) -> list[RunFolder]:
    """The finished runs of the same or an earlier date that a run may build on; the last one is preferred.

    A night of an older date thus sees only older runs. If there are runs with the night's own settings, later runs
    count only if they follow the newest of these: another configuration may run every night too. Among runs of one
    date, one with the night's settings comes last, otherwise the one that was finished last. Runs that were rolled back
    do not count.
    """
    run = workspace.run(run_id)
    finished = workspace.finished_runs(run.settings_hash)
    earlier = [other for other in finished if other.run_id != run_id and other.date <= run.date]
    own = [number for number, other in enumerate(earlier, 1) if other.settings_hash == run.settings_hash]
    if not own:
        return earlier
    newest = earlier[own[-1] - 1].run_id
    return earlier[: own[-1]] + [other for other in earlier[own[-1] :] if _follows(other, newest)]


def _follows(run: RunFolder, earlier: str) -> bool:
    """Whether a run is built on an earlier one, and the run between them that is next to it has a later date.

    Two configurations that run on one date stand side by side, although the second may be built on the first.
    """
    chain = [run.run_id, *run.ancestor_run_ids]
    return earlier in chain and chain[chain.index(earlier) - 1][:10] > earlier[:10]


def open_run(settings: Settings, run_id: str | None) -> Night:
    """Open an existing run, by default the published one, for a stage that is called alone."""
    workspace = Workspace.open(settings.workspace, create=False)
    run = workspace.chosen_run(run_id)
    manifest = RunManifest.load(run.manifest_path)
    return Night(_settings_of(manifest, settings), workspace, manifest.date, run, manifest)


def _settings_of(manifest: RunManifest, here: Settings) -> Settings:
    """A run's settings, with the sections `NOT_OF_OUTPUT` of `here`; `here` itself if it names the run the same way."""
    if settings_hash(here.identity()) == manifest.origin.settings_hash:
        return here
    raw = copy.deepcopy(manifest.origin.settings) | {name: getattr(here, name) for name in NOT_OF_OUTPUT}
    try:
        Settings.model_validate(raw)
    except ValidationError as error:
        unknown = [fault["loc"] for fault in error.errors() if fault["type"] == "extra_forbidden"]
        for *sections, key in unknown:
            holder: Any = raw
            for name in sections:
                holder = holder[name]
            holder.pop(key)
        if unknown:
            names = ", ".join(".".join(map(str, loc)) for loc in unknown)
            say(f"run {manifest.run_id} has settings that this version does not have; they are ignored: {names}")
    try:
        return Settings.model_validate(raw)
    except ValidationError as error:
        keys = ", ".join(".".join(map(str, fault["loc"])) for fault in error.errors())
        raise ConfigError(
            f"run {manifest.run_id} was made by laserbatch {manifest.origin.laserbatch_version} with settings that "
            f"this version does not have ({keys}); use that version for it, or run the night again"
        ) from None


def current_pools(
    store: PoolStore,
    min_support: int,
    date: datetime.date,
    chosen: str | None = None,
    not_used: Collection[str] = (),
    others: Collection[str] = (),
    tokenizer: str | None = None,
) -> PoolVersion | None:
    """The pools that a run of a date may draft from: the current ones, or the newest of `others` that fit.

    The version `chosen` takes precedence if it exists without a problem. Pools do not fit if they are of a later date
    or in `not_used` (of runs that are held or were rolled back), have a lower `min_support`, are damaged, or have
    another format or another tokenizer than the one with the hash `tokenizer`. `others` are finished runs; a removed
    run may have been held. Without pools (None) the night only writes more slowly.
    """
    try:
        versions = {entry.version: entry for entry in store.list()}
        first = chosen if chosen in versions and versions[chosen].problem is None else store.current_version()
    except PoolError as error:
        say(f"not drafting from any pools: {error}")
        return None
    if first in not_used:
        say(f"not drafting from the pools {first}: their run was rolled back or is held back by a gate")
    hashes = {name: {pool.tokenizer_hash for pool in entry.pools.values()} for name, entry in versions.items()}
    older = [name for name, of in hashes.items() if name in others and (tokenizer is None or of <= {tokenizer})]
    for version in dict.fromkeys((first, *reversed(older))) if first is not None else ():
        is_allowed = version[:10] <= str(date) and version not in not_used
        if is_allowed and can_be_used(store, version, tokenizer, min_support):
            if version != first:
                say(f"drafting from the pools {version}, the newest that fit")
            return versions[version]
    return None


def can_be_used(store: PoolStore, version: str, tokenizer: str | None = None, min_support: int = 1) -> bool:
    """Whether a version's routers load and its pools match their checksums and the arguments.

    `tokenizer` is a hash; None: any. Prints the problem if not.
    """
    try:
        for side in store.verify(version):
            pool = store.open(version, side, tokenizer)
            if pool is not None and pool.settings.min_support < min_support:
                raise PoolError(f"they have a lower pools.min_support than {min_support}.")
            Router.load(store.folder(version) / "router" / side)
    except PoolError as error:
        say(f"not drafting from the pools {version}: {error} The pools that are built from this run replace them")
        return False
    return True


def describe_pools(pools: PoolVersion | None) -> PoolsUsed:
    """Describe the pools that a run drafts from for its manifest, where they stay fixed for every later attempt."""
    if pools is None:
        return PoolsUsed()
    figures = {side: PoolFigures(pools.version, pool.num_texts, pool.num_tokens, pool.groups)
               for side, pool in pools.pools.items()}  # fmt: skip
    return PoolsUsed(pools.version, figures.get("user"), figures.get("item"))


def pools_in_use(workspace: Workspace) -> set[str]:
    """The pool versions that unfinished runs draft from and need when they are resumed."""
    runs = [run for run in workspace.runs() if not (run.is_finished or run.is_held) and run.manifest_path.exists()]
    manifests = [unless_damaged(run.load_manifest) for run in runs]  # a run with a damaged one cannot be resumed
    return set(filter(None, (manifest and manifest.generation.pools.version for manifest in manifests)))


def means(run: RunFolder, side: Side, columns: Sequence[str]) -> list[float | None]:
    """The mean of each column over the texts of a side; None if the side has no text."""
    batches = list(run.iter_knowledge(side, list(columns)))
    return [pc.mean(pa.chunked_array([batch[name] for batch in batches], pa.int32())).as_py() for name in columns]
