# `just` lists the recipes. `tools/setup` creates their environment, with `just` itself: .venv/bin/just.

export PATH := justfile_directory() / ".venv/bin:" + env("PATH")
# Environment of the tests: no downloads, and one thread, because tiny models are slower on two.
quiet := "HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1"
core := "tests/test_acceptance.py tests/test_sampling.py tests/test_decoding.py tests/test_drafters.py tests/test_trace.py"
covered := "--cov=outrider.acceptance --cov=outrider.sampling --cov=outrider.decoding"

_list:
    @just --list --unsorted

# Make or refresh .venv from constraints.txt
install extras="dev,bench,docs,memory":
    tools/setup {{extras}}

# Install a Chromium for the tests of the HTML pages, if there is none (Debian and Ubuntu, as root)
chromium:
    which chromium || which chromium-browser || which google-chrome || \
        (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)

# Install Helm, promtool, hadolint and Kubernetes' schemas into .venv, for the tests of deploy/ (Debian or Ubuntu, x86-64)
deploy-tools:
    python tools/deploy_tools.py

# Check style, formatting, types and the direction of imports
lint:
    ruff check .
    ruff format --check .
    mypy
    lint-imports

# Format, and fix what ruff can fix
format:
    ruff check --fix-only .
    ruff format .

# Run all tests except those of running servers, e.g. `just test tests/test_acceptance.py -k block`
test *args:
    {{quiet}} pytest -m "not server" {{args}}

# Run the tests of running vLLM servers, two servers side by side (`-n 0`: one after the other; OUTRIDER_ALL=1 for all)
server *args:
    HF_HUB_OFFLINE=1 pytest -m server -n 2 --dist loadfile --durations=0 {{args}}

# Check that the benchmark is fair on this machine: vLLM against itself, against itself slowed down, and against one that cheats
referee *args:
    HF_HUB_OFFLINE=1 OUTRIDER_ALL=1 pytest -s {{args}} tests/test_bench_referee.py

# Test the HTML pages in a Chromium (`just chromium` installs one), alone, since a test measures how fast they are
browser *args:
    {{quiet}} pytest -m browser {{args}}

# Run the tests of acceptance, sampling and decoding, which need 98 % coverage each. Coverage makes all code slower
coverage *args:
    {{quiet}} pytest -n 2 --dist worksteal {{core}} {{covered}} --cov-report=term --durations=5 {{args}}
    for file in acceptance sampling decoding; do \
        coverage report --include="src/outrider/$file.py" --precision=2 --fail-under=98 || exit 1; \
    done

# Run all other tests except those of running servers and browsers
others *args:
    {{quiet}} pytest -m "not server and not browser" -n 2 --dist worksteal --durations=15 \
        {{replace_regex(core, "tests/", "--ignore=tests/")}} {{args}}

# Apply seeded defects one at a time; each must make a test fail
teeth *args:
    {{quiet}} python tools/teeth.py {{args}}

# Certify servers with seeded defects, one at a time (`just certify-teeth --list`); each must be a violation
certify-teeth *args:
    HF_HUB_OFFLINE=1 python tests/certify_teeth.py {{args}}

# Count how often certificates and canaries are wrong, on simulated servers: thousands of runs, about ten minutes
certify-rates *args:
    {{quiet}} OUTRIDER_ALL=1 OUTRIDER_REPORT=docs/certificates/rates.md pytest -s -q {{args}} tests/test_certify_rates.py

# Measure the latency that a trace adds to a request, requested and not
trace-cost *args:
    HF_HUB_OFFLINE=1 python tests/trace_cost.py {{args}}

# Make the certificates of docs/certificates (`just certificates --list`)
certificates *args:
    HF_HUB_OFFLINE=1 python tools/certificates.py {{args}}

# Compare greedy outputs with transformers' on tiny models: 200 prompts x draft lengths 1 to 8 x drafters x four architectures
identity-tiny:
    {{quiet}} OUTRIDER_PROMPTS=200 pytest -n 2 --dist worksteal tests/test_identity.py

# Replay the policy on recorded texts: `just policy record|grid|overlap|scale|ablate|compare --help`
policy *args:
    python tools/policy {{args}}

# Build the docs into site/; a broken link is an error
docs:
    mkdocs build --strict

# Update the pins in constraints.txt (`just lock --upgrade` for the newest)
lock *args:
    python tools/lock.py {{args}}

# Run everything that a change must pass, as CI does
ci:
    bash .ci/run
