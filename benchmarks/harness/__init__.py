"""Parts that benchmarks share: runners that are fed by a scheduler or by hand, engines in processes, output."""
