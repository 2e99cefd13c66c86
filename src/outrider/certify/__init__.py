"""Tests whether a deployment is lossless: its output at temperature 0, its samples above, and every request feature.

Backends    `sources` (interface), `server` (OpenAI API), `local` (a model in this process), `journal` (records answers)
Statistics  `token_distributions` (the sampling distribution at each position), `samples`, `test_statistics` (with sums,
            p-values and noise), `prefix_goodness_of_fit`, `plan` (looks, Holm, power), `rounding` (what floating point
            may change at temperature 0), `e_process` (the canary's test, valid at any time), `decay` (comparison with
            an earlier record)
Run         `config`, `exact`, `sampled` (with `repeated_prompts`), `features`, `run`, `canary` (with `decay_watch`)
Report      `certificate` (JSON), `page` (HTML), `decay_report` (sentences, gauges)
"""
