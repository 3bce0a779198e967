"""Do the tests of `make test` notice faults outside of CUDA? ``faults`` lists them, ``__main__`` tries them."""
