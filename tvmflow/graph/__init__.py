"""Models as graphs of TVM's Relax: what frontends, the compiler, tuning and stages know of them."""
