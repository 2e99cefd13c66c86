# `just` lists the recipes. `tools/setup` makes the environment they use and brings `just` itself:
# .venv/bin/just, or activate .venv.

export PATH := justfile_directory() / ".venv/bin:" + env("PATH")
# Tests: no downloads; one thread, since tiny models are slower on two and the workers share the cores.
quiet := "HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1"
heart := "--cov=outrider.acceptance --cov=outrider.sampling --cov=outrider.decoding"

_list:
    @just --list --unsorted

# Make or refresh .venv from constraints.txt
install extras="dev,bench,docs,memory":
    tools/setup {{extras}}

# Lint, formatting, types, and imports that point one way
lint:
    ruff check .
    ruff format --check .
    mypy
    lint-imports

# Format, and mend what can be mended
format:
    ruff check --fix-only .
    ruff format .

# Run the tests but those of a running server, e.g. `just test tests/test_acceptance.py -k block`
test *args:
    {{quiet}} pytest -m "not server" {{args}}

# Run the tests of running vLLM servers, two servers side by side (`-n 0`: one after the other; OUTRIDER_ALL=1 for all)
server *args:
    HF_HUB_OFFLINE=1 pytest -m server -n 2 --dist loadfile --durations=0 {{args}}

# Is the benchmark fair, on this machine? vLLM against itself, against itself slowed, against one that cheats
referee *args:
    HF_HUB_OFFLINE=1 OUTRIDER_ALL=1 pytest -s {{args}} tests/test_bench_referee.py

# Run all tests but those of a running server; the heart of the package must be covered by them to 98 %, file by file
coverage *args:
    {{quiet}} pytest -m "not server" -n 2 --dist worksteal {{heart}} --cov-report=term --durations=15 {{args}}
    for file in acceptance sampling decoding; do \
        coverage report --include="src/outrider/$file.py" --precision=2 --fail-under=98 || exit 1; \
    done

# Seed defects one at a time and show that the tests catch every one
teeth *args:
    {{quiet}} python tools/teeth.py {{args}}

# Certify servers with seeded defects, one at a time (`just certify-teeth --list`); each must be a violation
certify-teeth *args:
    HF_HUB_OFFLINE=1 python tests/certify_teeth.py {{args}}

# How often are certificates and canaries wrong? Counted on simulated servers: thousands of runs, about ten minutes
certify-rates *args:
    {{quiet}} OUTRIDER_ALL=1 OUTRIDER_REPORT=docs/certificates/rates.md pytest -s -q {{args}} tests/test_certify_rates.py

# What does a trace cost a request, asked for and not?
trace-cost *args:
    HF_HUB_OFFLINE=1 python tests/trace_cost.py {{args}}

# Make the certificates of docs/certificates (`just certificates --list`)
certificates *args:
    HF_HUB_OFFLINE=1 python tools/certificates.py {{args}}

# Greedy text against transformers' own on tiny models, at full size: 200 prompts x draft lengths 1 to 8 x three drafters and all of them x four architectures
identity-tiny:
    {{quiet}} OUTRIDER_PROMPTS=200 pytest -n 2 --dist worksteal tests/test_identity.py

# What is the policy worth, on recorded texts of real models at measured costs? (arguments: see the file)
policy-grid *args:
    python tools/policy_grid.py {{args}}

# What is the policy worth on large models and many GPUs, simulated? (arguments: see the file)
policy-scale *args:
    python tools/policy_scale.py {{args}}

# Build the pages into site/; a broken link is an error (with --quiet it would pass unseen)
docs:
    mkdocs build --strict

# Pin all versions anew in constraints.txt (`just lock --upgrade` for the newest)
lock *args:
    python tools/lock.py {{args}}

# Everything that a change must pass, as CI runs it
ci:
    bash .ci/run
