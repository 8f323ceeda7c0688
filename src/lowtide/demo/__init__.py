"""The demo: a tiny model learns arithmetic, from nothing but this package. See `lowtide.demo.run`."""
