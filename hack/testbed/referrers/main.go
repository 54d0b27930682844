// A registry in memory with the referrers API, which Debian's docker-registry lacks.      referrers ADDRESS
package main

import (
	"log"
	"net/http"
	"os"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
)

func main() {
	server := &http.Server{
		Addr:              os.Args[1],
		Handler:           registry.New(registry.WithReferrersSupport(true)),
		ReadHeaderTimeout: 5 * time.Second,
	}
	log.Fatal(server.ListenAndServe())
}
