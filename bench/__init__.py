"""The microbenchmark suite: what each path costs beside its peers and its limit, on this machine.

Run it with `python -m bench`; `python -m bench.report FILE` turns a result into tables and a chart again.
The parts, in the order in which a run uses them:

    settings   what was asked for            registry   which rows that means
    peers      frozen base, PEFT, torch.compile of PEFT, fastlora
    layers     single layers and their fp64 truth       model      one training step of SmolLM2-135M
    masks      which elements a layer drops, read off its outputs
    imports    what `import fastlora` costs
    check      a result against the truth: a wrong one gets no time
    measure    peers interleaved in one run             runner     one row from build to figures
    report     bars, tables, chart, README
"""
