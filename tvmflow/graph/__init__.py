"""Models as graphs of TVM's Relax: shared knowledge of frontends, the compiler, tuning and stages."""
