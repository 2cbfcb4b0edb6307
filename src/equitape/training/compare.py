"""Every encoding and seed of a recipe, trained and scored, and one results.json about all of them.

results.json, which reports are made from, is this dictionary (all of it plain JSON; null where a number is unknown):

    name           the recipe's name
    recipe         the whole resolved recipe, overrides applied; written to a file it is a recipe that repeats this run
    task           {name, idea, headline, higher_is_better, trained_length, tested_length};
                   headline names the metric to show first
    claims         {label: {metric: number}}, numbers others published for this task; claims, not measurements;
                   `claims_source` says whose
    claims_source  one line, or null
    environment    {equitape, torch, transformers, accelerate, python, device, processor, commit, date}
                   (commit: null outside a git checkout, with "+changes" behind it when files differ from it; date: UTC,
                   ISO 8601)
    runs           a list, in the order of the recipe: encodings outside, seeds inside; one dictionary a run:
        label            what reports call the encoding, unique to it ("tape", "tape, no carry")
        encoding         {kind, ...}, every option spelled out
        seed
        status           "done", "nan" (the loss stopped being a number), "failed", or "missing" (not run yet)
        note             one sentence where status is not "done", else ""
        parameters       number of weights
        steps            optimizer steps done
        trained_tokens   tokens seen, padding not counted
        seconds          of training, evaluation and start-up not counted
        tokens_per_second
        peak_mib         most memory held on the device while training; null on the CPU
        evaluate_seconds
        log              [[step, loss], ...], at most about 400 points, each the mean of the steps up to it
        evaluation       {metrics: {name: number}, heat_maps: [...], curves: [...]} as `tasks.base.Evaluation` has them;
                         null unless status is "done"

Metric names that contain "outside" are out of distribution, all others inside (see `tasks.base.Evaluation`).
"""
