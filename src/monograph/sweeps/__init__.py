"""Many runs that differ in a few settings: who they are, how many train at once, what came of them."""
