"""What users and the code outside blocks see of weights, gradients and states while a plan is carried out."""
