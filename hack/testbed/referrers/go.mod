module archaware.dev/testbed/referrers

go 1.26.6

require github.com/google/go-containerregistry v0.22.1
