"""Running plans: scheduling with doit, cached answers, prefetching, progress, reports, delivery. Imports provenance and all layers below it."""
