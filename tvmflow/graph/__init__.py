"""Models as graphs of TVM's Relax: code that frontends, the compiler, tuning and stages share."""
