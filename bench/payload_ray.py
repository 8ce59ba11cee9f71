"""Ray's side of bench/payload.py, for a python that has ray and numpy. Prints one JSON line of GB/s lists.

Between two raylets of one machine (objects are made on one, got on the other, copied into memory that is
there already), and out of one raylet's shared memory.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import ray
from ray.cluster_utils import Cluster

REST_S = 0.3


def main() -> int:
    nbytes, blobs, rounds, threads = (int(arg) for arg in sys.argv[1:5])
    pool = ThreadPoolExecutor(threads)
    store = max(512 << 20, 4 * nbytes * blobs)
    cluster = Cluster()
    cluster.add_node(num_cpus=1, resources={"near": 1}, object_store_memory=store, include_dashboard=False)
    cluster.add_node(num_cpus=1, resources={"far": 1}, object_store_memory=store)
    ray.init(address=cluster.address, log_to_driver=False)
    blob = np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8)
    buffer = np.zeros(nbytes * blobs, np.uint8)
    targets = [buffer[n * nbytes : (n + 1) * nbytes] for n in range(blobs)]

    @ray.remote(num_cpus=0, resources={"far": 1})
    class Producer:
        def put(self, blob):
            return [ray.put(np.array(blob)) for _ in range(blobs)]

    producer = Producer.remote()

    def copy_out(refs, run=pool.map) -> float:
        time.sleep(REST_S)
        begun = time.perf_counter()
        list(run(np.copyto, targets, ray.get(refs)))
        return len(buffer) / (time.perf_counter() - begun) / 1e9

    far, near, alone = [], [], []
    for _ in range(rounds + 1):
        refs = ray.get(producer.put.remote(blob))
        far.append(copy_out(refs))
        del refs
        refs = [ray.put(np.array(blob)) for _ in range(blobs)]
        near.append(copy_out(refs))
        del refs
        refs = [ray.put(np.array(blob)) for _ in range(blobs)]
        alone.append(copy_out(refs, map))
        del refs
    figures = {
        "Ray between two raylets": far[1:],
        "Ray shared memory, copied by threads": near[1:],
        "Ray shared memory, copied by one thread": alone[1:],
    }
    print(json.dumps(figures))
    ray.shutdown()
    cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
