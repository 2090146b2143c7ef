"""Runs of plans: scheduling with doit, cached answers, prefetching, progress, reports, delivery."""
