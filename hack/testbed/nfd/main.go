// Node Feature Discovery (NFD) itself, for tests that compare archaware with it.
//
//	nfd labels      the labels that it gives this machine for its CPU, as JSON
//	nfd evaluate    for each line {"document", "nodes": [features]} of standard input, a line with a list for each node: whether
//	                each compatibility of the document holds there, or the error that NFD ends with
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"

	compat "sigs.k8s.io/node-feature-discovery/api/image-compatibility/v1alpha1"
	nfd "sigs.k8s.io/node-feature-discovery/api/nfd/v1alpha1"
	artifact "sigs.k8s.io/node-feature-discovery/pkg/client-nfd/compat/artifact-client"
	validator "sigs.k8s.io/node-feature-discovery/pkg/client-nfd/compat/node-validator"
	"sigs.k8s.io/node-feature-discovery/source"
	"sigs.k8s.io/yaml"
)

// Longest line of standard input.
const maxLine = 16 << 20

// node is a feature source with the features of one node, below the name "test".
type node struct{ features *nfd.Features }

func (*node) Name() string                 { return "test" }
func (*node) Discover() error              { return nil }
func (n *node) GetFeatures() *nfd.Features { return n.features }

// document is an artifact client that fetches nothing.
type document struct{ spec *compat.Spec }

func (d document) FetchCompatibilitySpec(context.Context) (*compat.Spec, error) { return d.spec, nil }

var _ artifact.ArtifactClient = document{}

type result struct {
	Holds []bool `json:"holds"`
	Error string `json:"error"`
}

func evaluate(client document, current *node, features *nfd.Features) result {
	current.features = features
	instance := validator.New(validator.WithArgs(&validator.Args{}), validator.WithArtifactClient(client))
	all, err := instance.Execute(context.Background())
	if err != nil {
		return result{Error: err.Error()}
	}
	holds := make([]bool, 0, len(all))
	for _, one := range all {
		matches := true
		for _, rule := range one.Rules {
			matches = matches && rule.IsMatch
		}
		holds = append(holds, matches)
	}
	return result{Holds: holds}
}

func evaluateAll() error {
	current := &node{}
	source.Register(current)
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, maxLine)
	answers := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var question struct {
			Document string          `json:"document"`
			Nodes    []*nfd.Features `json:"nodes"`
		}
		if err := json.Unmarshal(lines.Bytes(), &question); err != nil {
			return err
		}
		client := document{spec: &compat.Spec{}}
		if err := yaml.Unmarshal([]byte(question.Document), client.spec); err != nil {
			return err
		}
		answer := make([]result, 0, len(question.Nodes))
		for _, features := range question.Nodes {
			answer = append(answer, evaluate(client, current, features))
		}
		if err := answers.Encode(answer); err != nil {
			return err
		}
	}
	return lines.Err()
}

func labels() error {
	// By default some features have no label.
	configurable := source.GetConfigurableSource("cpu")
	configurable.SetConfig(configurable.NewConfig())
	cpu := source.GetFeatureSource("cpu")
	if err := cpu.Discover(); err != nil {
		return err
	}
	found, err := source.GetLabelSource("cpu").GetLabels()
	if err != nil {
		return err
	}
	all := make(map[string]string, len(found))
	for name, value := range found {
		all[nfd.FeatureLabelNs+"/cpu-"+name] = fmt.Sprint(value)
	}
	return json.NewEncoder(os.Stdout).Encode(all)
}

func main() {
	run := map[string]func() error{"labels": labels, "evaluate": evaluateAll}
	if len(os.Args) != 2 || run[os.Args[1]] == nil {
		log.Fatal("usage: nfd labels|evaluate")
	}
	if err := run[os.Args[1]](); err != nil {
		log.Fatal(err)
	}
}
