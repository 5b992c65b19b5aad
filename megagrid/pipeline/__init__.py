"""Pipeline parallelism: schedules as data, free of torch, and the executor that runs them."""
