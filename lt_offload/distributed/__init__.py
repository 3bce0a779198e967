"""Several processes that train one model, each with a device of its own: what they agree on, and what they add up.

``torch.distributed`` moves the bytes (gloo in host memory, NCCL between GPUs), and Lightning starts the processes. Here
is what they say to each other: ``rendezvous`` lets them find each other, ``ranks`` has the connections of all and
``peers`` those of a group, ``merge`` makes one profile of all, ``sums`` adds gradients up in the order of ranks, and
``watch`` notices who is gone.
"""
