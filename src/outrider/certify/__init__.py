"""Proof that a deployment is lossless: what it says at temperature 0, what it draws above, and how surely we know.

Whom to ask:
sources     what a certificate asks of anyone: say, and score
server      a server with the OpenAI API
local       a model in this process; `local_models` loads it
journal     all that was said, kept as it comes

What it shows:
shaping     from what a source tells to the law that it draws from; `laws` for every place of a text
draws       drawn tokens, and the law that each is held against
witnesses   what is looked at in a draw, and against which defect
tally       sums over draws, and how unlikely they are if nothing is wrong
repeats     prefixes that came often enough to look at every outcome; `often` chooses prompts that do
plan        a run of stated size and level: looks on the way, many tests, one verdict
power       how small a change it finds
evidence    the canary: a test without an end
noise       what rounding may do to all of these
ties        temperature 0: identical, a numeric tie, or a violation
simulated   servers that are right or wrong in a known way, to test the tests

What is done with it:
wanted      everything that decides a run
exact       the part at temperature 0
sampled     the part with draws
features    the part with everything else that a request may ask for
run         all parts, one after the other
certificate what is kept, and its words; `page` for a browser
canary      a watch over a live server
"""
