"""Which rows a run has: operations x shapes x dtypes x peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.settings import Settings

RANK, ALPHA = 16, 32
HIDDEN, KEY_VALUE, INTERMEDIATE, VOCABULARY = 576, 192, 1536, 49152  # SmolLM2-135M
DROPOUTS = (0.0, 0.1)
TOKENS = (1, 4, 16, 64, 128, 512, 2048)
LINEARS = (
    (HIDDEN, HIDDEN),
    (HIDDEN, KEY_VALUE),
    (HIDDEN, INTERMEDIATE),
    (INTERMEDIATE, HIDDEN),
    (1024, 1024),
    (2048, 2048),
)
PEERS = ("frozen", "peft", "compile", "fastlora")
NOT_COMPILED = "one compilation takes 10 to 60 s: timed for a few rows, for more with --full"


@dataclass(frozen=True)
class Case:
    """Rows measured together in one interleaved run: one shape, one dtype, each dropout.

    op: the operation. dims: its sizes (in and out features; for "model" batch and length; for
    "embedding" vocabulary and features). m: rows of x. left_out: peers not run, and why.
    repeats: rounds to time, 0 for none.
    """

    op: str
    dims: tuple[int, ...]
    m: int
    dtype: str
    dropouts: tuple[float, ...] = (0.0,)
    left_out: dict[str, str] = field(default_factory=dict)
    repeats: int = 9

    @property
    def id(self) -> str:
        if self.op == "import":
            return "import"
        size = "x".join(map(str, self.dims))
        rows = "" if self.op == "model" else f"-M{self.m}"
        return f"{self.op}-{size}{rows}-{self.dtype}"

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(peer for peer in PEERS if peer not in self.left_out)

    def row_id(self, dropout: float) -> str:
        return self.id if self.op == "import" else f"{self.id}-p{dropout:g}"

    @property
    def row_ids(self) -> tuple[str, ...]:
        return tuple(self.row_id(dropout) for dropout in self.dropouts)


def cases(settings: Settings) -> list[Case]:
    """The rows of a run, in the order in which they are measured.

    The model comes first, while the machine is as it was found; its half types, which are slow on
    many CPUs, come last, so that a budget that runs out takes no other row with it.
    """
    wanted = settings.only or ("import", "model", "linear", "qkv", "mlp", "embedding")
    chosen = [
        case
        for case in _all(settings)
        if case.op in wanted or (case.op == "model" and "memory" in wanted)
    ]
    if "memory" in wanted and "model" not in wanted:
        chosen = [_untimed(case) if case.op == "model" else case for case in chosen]
    return [
        case
        for case in chosen
        if (not settings.dtypes or case.dtype in settings.dtypes)
        and any(settings.rows in row for row in case.row_ids)
    ]


def _all(settings: Settings) -> Iterator[Case]:
    quick, full = settings.mode == "quick", settings.mode == "full"
    no_compile = {"compile": NOT_COMPILED}
    yield Case(
        "import", (), 0, "float32", left_out={"compile": "", "peft": ""}, repeats=settings.repeats
    )

    batch = (1, 32) if quick else (4, 128)
    model_left_out = (
        {} if full else {"compile": "compiling 30 layers takes minutes: --full runs it"}
    )

    def model(dtype: str, repeats: int) -> Case:
        return Case("model", batch, batch[0] * batch[1], dtype, DROPOUTS, model_left_out, repeats)

    yield model("float32", settings.model_repeats)
    yield from _layers(settings, "float32", (1, 128) if quick else TOKENS, no_compile)
    if not quick:
        yield from _layers(settings, "bfloat16", TOKENS if full else (1, 128), no_compile)
        yield model("bfloat16", settings.slow_repeats)


def _layers(
    settings: Settings, dtype: str, tokens: tuple[int, ...], no_compile: dict[str, str]
) -> Iterator[Case]:
    quick, full = settings.mode == "quick", settings.mode == "full"
    half = dtype != "float32"
    linears = LINEARS if full or not (half or quick) else ((HIDDEN, HIDDEN), (HIDDEN, INTERMEDIATE))
    shapes = [
        *(("linear", dims) for dims in linears),
        ("qkv", (HIDDEN, KEY_VALUE)),
        ("mlp", (HIDDEN, INTERMEDIATE)),
        ("embedding", (VOCABULARY, HIDDEN)),
    ]
    for op, dims in shapes:
        dropouts = (0.0,) if op == "embedding" else DROPOUTS
        for m in tokens:
            # One size of each op in the default run: 128 rows, where a compiled graph has most to gain.
            compiled = (
                m in (1, 128, 512) if full else (m == 128 and not half and dims != (1024, 1024))
            )
            compiled = compiled and (full or (not quick and (op != "linear" or dims == linears[0])))
            yield Case(
                op, dims, m, dtype, dropouts, {} if compiled else no_compile, settings.repeats
            )


def _untimed(case: Case) -> Case:
    return Case(case.op, case.dims, case.m, case.dtype, case.dropouts, case.left_out, repeats=0)
