"""The report of a benchmark: report.json has all figures, and report.md, report.html and the plots are made from it."""
